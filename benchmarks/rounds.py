"""Time rounds of speculative decoding on a GPU, ours or vLLM's own DSpark, with a given mean of accepted drafts.

python -m benchmarks.rounds MODEL [--native] [--ways off,fixed,scheduled] [--cases 1x512,8x2048] [--json FILE]

A way is an engine of its own: "off" has no drafts, "fixed" verifies all of them, "scheduled" as many as pay (vLLM's
own: its adaptive verification). Acceptance is vLLM's synthetic one, so weights may be random: give a model without
them `--load-format dummy`. A round is a verification and the drafting behind it; its time is what a request's tokens
behind the first take, over its rounds, median over `--repeat`. A case is BATCHxPROMPT.
"""

import argparse
import gc
import json
import os
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from benchmarks.engine import runner  # noqa: E402

WAYS = ("off", "fixed", "scheduled")
DRAFTS = "vllm:spec_decode_num_drafts"


def options(arguments: argparse.Namespace, way: str) -> dict[str, Any]:
    """Of `vllm.LLM`."""
    chosen: dict[str, Any] = {
        "model": str(arguments.model),
        "load_format": arguments.load_format,
        "max_model_len": 8192,
        "gpu_memory_utilization": 0.85,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "limit_mm_per_prompt": {"image": 0},
        "disable_log_stats": False,
    }
    if way != "off":
        chosen["speculative_config"] = {
            "method": "dspark",
            "num_speculative_tokens": arguments.drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": arguments.accepted,
            "enable_adaptive_verification": way == "scheduled",
        }
        if not arguments.native:
            chosen["additional_config"] = {"deepinfer": {"scheduled_verification": way == "scheduled"}}
    return chosen | arguments.kwargs


def measure(llm: Any, batch: int, length: int, tokens: int, repeat: int) -> dict[str, Any]:
    def rounds() -> float:
        return sum(m.value for m in llm.get_metrics() if m.name == DRAFTS) / batch

    run = runner(llm, batch, length)
    run(8)
    seconds, counted = [], []
    for _ in range(repeat):
        first, before = run(1), rounds()
        seconds.append(run(tokens) - first)
        counted.append(rounds() - before or tokens - 1)
    return {
        "round_ms": round(statistics.median(s / c for s, c in zip(seconds, counted, strict=True)) * 1e3, 2),
        "tokens_per_round": round(statistics.median((tokens - 1) / c for c in counted), 2),
        "tokens_per_s": round(statistics.median(batch * (tokens - 1) / s for s in seconds)),
        "seconds": [round(s, 4) for s in seconds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--native", action="store_true", help="vLLM's own V4.1")
    parser.add_argument("--ways", default="off,fixed,scheduled", type=lambda text: text.split(","))
    parser.add_argument("--cases", default="1x512,8x512,32x512,64x512,8x2048")
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--accepted", type=float, default=3.51, help="mean tokens of a round, at most drafts + 1")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if unknown := set(arguments.ways) - set(WAYS):
        parser.error(f"--ways: must be of {', '.join(WAYS)}, got {', '.join(unknown)}")
    if arguments.native:
        os.environ["VLLM_PLUGINS"] = ""
    import torch

    if not torch.cuda.is_available():
        parser.error("needs a GPU, found none")
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    result: dict[str, Any] = {
        "engine": "vLLM's own V4.1" if arguments.native else "deepinfer-plugin",
        "card": torch.cuda.get_device_name(),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "date": str(date.today()),
        "drafts": arguments.drafts,
        "ways": {},
    }
    for way in arguments.ways:
        start = time.perf_counter()
        llm = vllm.LLM(**options(arguments, way))
        times: dict[str, Any] = {"start_s": round(time.perf_counter() - start, 1), "cases": {}}
        result["ways"][way] = times
        for case in arguments.cases.split(","):
            batch, length = map(int, case.split("x"))
            times["cases"][case] = measure(llm, batch, length, arguments.tokens, arguments.repeat)
            print(json.dumps({"way": way, "case": case, **times["cases"][case]}), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


if __name__ == "__main__":
    main()
