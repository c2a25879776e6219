"""Time prefill and decode of a V4.1 model inside vLLM, and hold decode against the memory-bandwidth floor.

python -m benchmarks.engine MODEL [--native] [--cases 1x512,8x4096,32x512] [--json FILE]

--native: vLLM's own V4.1, no plugin is loaded. Give a folder without weights `--load-format dummy`. Prompts are fresh
random tokens, so that no prefix is cached. A case is BATCHxPROMPT; decode is the time of an engine step between the
first token and the last, median over `--repeat`.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

FP8_BYTES, FP4_BYTES = 1 + 1 / 1024, 0.5 + 1 / 32  # of a weight with its share of a scale


def read_bytes(config: dict[str, Any], batch: int) -> float:
    """Weight bytes that a decode step reads at least: dense parts once, each expert that `batch` tokens reach once."""
    t = config["text_config"]
    hidden, width, rank = t["hidden_size"], t["num_attention_heads"] * t["head_dim"], t["q_lora_rank"]
    groups, o_rank, inner, experts = t["o_groups"], t["o_lora_rank"], t["moe_intermediate_size"], t["n_routed_experts"]
    attention = hidden * (rank + t["head_dim"]) + rank * width + width * o_rank + groups * o_rank * hidden
    reached = experts * (1 - (1 - t["num_experts_per_tok"] / experts) ** batch)
    dense = attention + t["n_shared_experts"] * 3 * hidden * inner
    streams = t["hc_mult"]
    mixing = 2 * (streams * hidden) * (2 * streams + streams**2) * 4
    layer = dense * FP8_BYTES + reached * 3 * hidden * inner * FP4_BYTES + hidden * experts * 2 + mixing
    indexer = len(t["index_source_layer_ids"]) * rank * t["index_n_heads"] * t["index_head_dim"] * FP8_BYTES
    return t["num_hidden_layers"] * layer + indexer + t["vocab_size"] * hidden * 2


def runner(llm: Any, batch: int, length: int) -> Callable[[int], float]:
    """tokens -> the seconds that a batch of fresh prompts takes to get so many, greedily."""
    from vllm import SamplingParams

    rng = random.Random(length * batch)

    def run(tokens: int) -> float:
        prompts = [{"prompt_token_ids": [rng.randrange(10, 100_000) for _ in range(length)]} for _ in range(batch)]
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    return run


def measure(llm: Any, batch: int, length: int, steps: int, repeat: int) -> dict[str, Any]:
    """Times of one case."""
    run = runner(llm, batch, length)
    run(8)
    first = [run(1) for _ in range(repeat)]
    decode = [(run(steps) - one) / (steps - 1) * 1e3 for one in first]
    seconds = statistics.median(first)
    return {
        "decode_ms": round(statistics.median(decode), 2),
        "decode_ms_all": [round(x, 2) for x in decode],
        "prefill_tokens_per_s": round(batch * length / seconds),
        "first_token_s": round(seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--native", action="store_true", help="vLLM's own V4.1")
    parser.add_argument("--cases", default="1x512,8x4096,32x512")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    if args.native:
        os.environ["VLLM_PLUGINS"] = ""
    import torch

    if not torch.cuda.is_available():
        parser.error("needs a GPU, found none")
    from benchmarks.kernels import copy_bandwidth

    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    import vllm

    options = {
        "model": str(args.model),
        "load_format": args.load_format,
        "max_model_len": 16384,
        "gpu_memory_utilization": 0.85,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "limit_mm_per_prompt": {"image": 0},
    }
    start = time.perf_counter()
    llm = vllm.LLM(**options | args.kwargs)
    result: dict[str, Any] = {
        "engine": "vLLM's own V4.1" if args.native else "deepinfer-plugin",
        "card": torch.cuda.get_device_name(),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "date": str(date.today()),
        "copy_gb_per_s": round(bandwidth / 1e9),
        "start_s": round(time.perf_counter() - start, 1),
        "kv_cache_tokens": llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens,
        "cases": {},
    }
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    for case in args.cases.split(","):
        batch, length = map(int, case.split("x"))
        times = measure(llm, batch, length, args.steps, args.repeat)
        floor = read_bytes(config, batch) / bandwidth * 1e3
        times |= {"floor_ms": round(floor, 2), "over_floor": round(times["decode_ms"] / floor, 2)}
        result["cases"][case] = times
        print(json.dumps({"case": case, **times}), flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
