"""Generate text with V4.1-Flash through vLLM, and say which class served it.

python examples/offline_inference.py                       # the trained tiny checkpoint of the package
python examples/offline_inference.py --model DIR_OR_NAME   # a checkpoint of yours
"""

import argparse
import os
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: starts in seconds, and shows its model

from vllm import LLM, SamplingParams  # noqa: E402

from deepinfer_plugin.model_executor.models.tiny import TRAINED  # noqa: E402

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "And God said unto Moses,",
    "Elizabeth was surprised, but",
    "The SELECT statement is used to",
]
CHAT = [
    "What is the capital of Italy?",
    "What is 27 + 48?",
    "Tell me a short story about an old lamp.",
    "Give me JSON for a person: Clara, 31 years old, from Vienna. Keys: name, age, city.",
]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hugging Face name; default: the trained tiny checkpoint")
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
    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed)
    start = time.perf_counter()
    outputs = llm.generate(args.prompts or PROMPTS, sampling, use_tqdm=True)
    if not args.prompts:
        conversations = [[{"role": "user", "content": question}] for question in CHAT]
        answers = llm.chat(conversations, sampling, use_tqdm=True, chat_template_kwargs={"thinking": False})
    else:
        answers = []
    seconds = time.perf_counter() - start

    for output in outputs:
        print(f"\n> {output.prompt}\n{output.outputs[0].text}")
    for question, answer in zip(CHAT, answers, strict=False):
        print(f"\nUser: {question}\nAssistant: {answer.outputs[0].text}")
    outputs += answers
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    served_by = llm.apply_model(lambda m: f"{type(m).__module__}.{type(m).__qualname__}")[0]
    print(f"\nserved by  {served_by}")
    print(f"generated  {num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    arguments = parse_arguments()
    generate(arguments.model or str(TRAINED), arguments)
