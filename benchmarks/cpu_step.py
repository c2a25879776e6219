"""Milliseconds per decode step on a CPU: the tiny V4.1 (8 layers) beside vLLM's own Llama (2 layers, same hidden size).

    python -m benchmarks.cpu_step [--dtype float32] [--steps 128] [--repeat 3]

Each model runs in a process of its own. A step's time is the difference of two runs that differ only in their number of
generated tokens, so prefill and start-up drop out; the median of the repeats is printed.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

BATCHES = (1, 4, 16)
PROMPT_TOKENS, SHORT = 32, 16


def write_llama(folder: Path, hidden_size: int = 128) -> None:
    """A two-layer Llama configuration of the tiny V4.1's width, with its tokenizer; weights are vLLM's dummies."""
    from deepinfer_plugin.model_executor.models.tiny import write_tiny

    write_tiny(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def measure(model: str, dtype: str, steps: int, repeat: int) -> dict[int, float]:
    """Median milliseconds per decode step, by batch size."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    is_llama = json.loads((Path(model) / "config.json").read_text())["model_type"] == "llama"
    llm = LLM(
        model,
        dtype=dtype,
        load_format="dummy" if is_llama else "auto",
        max_model_len=2048,
        kv_cache_memory_bytes=2**28,
        enforce_eager=True,
        enable_prefix_caching=False,
    )

    def seconds(batch: int, num_tokens: int) -> float:
        prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 250 for j in range(PROMPT_TOKENS)]} for i in range(batch)]
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    result = {}
    for batch in BATCHES:
        seconds(batch, SHORT)
        runs = [seconds(batch, SHORT + steps) - seconds(batch, SHORT) for _ in range(repeat)]
        result[batch] = 1000 * statistics.median(runs) / steps
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--model", help=argparse.SUPPRESS)  # the child process's one model
    args = parser.parse_args()
    if args.model:
        print("RESULT", json.dumps(measure(args.model, args.dtype, args.steps, args.repeat)))
        return

    from deepinfer_plugin.model_executor.models.tiny import write_tiny

    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {"V4.1 tiny, 8 layers": (Path(folder) / "v41", write_tiny)}
        models["Llama, 2 layers"] = (Path(folder) / "llama", write_llama)
        for name, (path, write) in models.items():
            write(path)
            command = [sys.executable, "-m", "benchmarks.cpu_step", "--model", str(path), "--dtype", args.dtype]
            command += ["--steps", str(args.steps), "--repeat", str(args.repeat)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            line = next(line for line in output.splitlines() if line.startswith("RESULT"))
            rows[name] = json.loads(line.removeprefix("RESULT"))

    print(
        f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, vLLM {version('vllm')}, {args.dtype}"
    )
    print(f"{'ms per decode step':24}" + "".join(f"{f'batch {batch}':>12}" for batch in BATCHES))
    for name, times in rows.items():
        print(f"{name:24}" + "".join(f"{times[str(batch)]:12.2f}" for batch in BATCHES))
    ours, llama = rows.values()
    print(f"{'ratio':24}" + "".join(f"{ours[str(b)] / llama[str(b)]:12.2f}" for b in BATCHES))


if __name__ == "__main__":
    main()
