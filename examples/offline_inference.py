"""Generate text with V4.1-Flash through vLLM, and say which class served it.

python examples/offline_inference.py                       # a tiny checkpoint with random weights, made on the spot
python examples/offline_inference.py --model DIR_OR_NAME   # a checkpoint of yours
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: starts in seconds, and shows its model

from vllm import LLM, SamplingParams  # noqa: E402

from deepinfer_plugin.model_executor.models.tiny import write_tiny  # noqa: E402

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "def fibonacci(n):",
    "The quick brown fox jumps over the lazy dog. " * 6,
]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hugging Face name; default: a tiny random checkpoint")
    parser.add_argument("--prompt", action="append", dest="prompts", help="may be given several times")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's bfloat16), bfloat16 or float32")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--kv-cache-gib", type=float, default=0.25, help="memory for the KV cache")
    return parser.parse_args()


def generate(model: str, args: argparse.Namespace) -> None:
    llm = LLM(
        model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        kv_cache_memory_bytes=int(args.kv_cache_gib * 2**30),
        enforce_eager=True,
        seed=args.seed,
    )
    sampling = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed, ignore_eos=args.model is None
    )
    start = time.perf_counter()
    outputs = llm.generate(args.prompts or PROMPTS, sampling, use_tqdm=True)
    seconds = time.perf_counter() - start

    for output in outputs:
        print(f"\n> {output.prompt!r}\n{output.outputs[0].text!r}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    served_by = llm.apply_model(lambda m: f"{type(m).__module__}.{type(m).__qualname__}")[0]
    print(f"\nserved by  {served_by}")
    print(f"generated  {num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.model:
        generate(arguments.model, arguments)
    else:
        with tempfile.TemporaryDirectory(prefix="tiny-v41-") as folder:
            write_tiny(Path(folder))
            print("The tiny checkpoint has random weights: its text is noise, computed by every part of V4.1.")
            generate(folder, arguments)
