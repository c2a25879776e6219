"""Check and time every GPU kernel at V4.1's shapes against its definition and the card's own ceilings.

python -m benchmarks.kernels [--tokens 1,64,4096] [--ops linear_fp8,moe_experts] [--module triton_nvidia] [--json FILE]

Ceilings are measured first: a large copy, and a large bf16 product. Each case runs `--repeat` times inside one CUDA
graph. Errors come first, at smaller sizes: the norm of the difference to the definition over the norm of the
definition; of chosen indices, the share that differs.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from deepinfer_plugin.kernels.packed_weights import Fp4Weight, Fp8Weight
from deepinfer_plugin.kernels.samples import MAX_ERROR, Case, Sizes, cases, error_of

CHECKED_TOKENS = (1, 33)
CACHE_BYTES = 200e6


CHECKED = Sizes(context=4096, experts=32, vocab=4096, candidate_blocks=128)  # definitions need much memory


@dataclass
class Result:
    op: str
    name: str
    tokens: int
    microseconds: float
    gigabytes_per_second: float
    teraflops: float
    share_of_ceiling: float
    times_reference: float | None  # None where the definition needs too much memory


def check(wanted: set[str], module: str) -> None:
    """Print every case's error. Raises SystemExit: one is above MAX_ERROR."""
    wrong = []
    for tokens in CHECKED_TOKENS:
        for case in cases(CHECKED, tokens, "cuda"):
            if case.op in wanted:
                error = error_of(case, module)
                print(f"check {case.op:20} {case.name:16} {tokens:4} tokens, error {error:.1e}")
                if not error <= MAX_ERROR:
                    wrong.append(f"{case.op} {case.name} of {tokens} tokens: {error:.1e}")
    if wrong:
        raise SystemExit("benchmark: wrong results of " + "; ".join(wrong))


def rotated(case: Case) -> list[Case]:
    """The case with as many copies of its weights as do not fit a cache together, as in a model."""

    def copied(value: Any) -> Any:
        if isinstance(value, Fp8Weight | Fp4Weight):
            return replace(value, codes=value.codes.clone(), sf=value.sf.clone())
        return value

    if not any(isinstance(value, Fp8Weight | Fp4Weight) for value in case.args):
        return [case]
    copies = range(min(16, int(CACHE_BYTES / case.num_bytes)))
    return [case, *(replace(case, args=tuple(copied(value) for value in case.args)) for _ in copies)]


def graph_time(run: Callable[[], Any], repeat: int) -> float:
    """Seconds of one call, median over replays of a graph of `repeat` calls."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            run()
    return call_time(graph.replay, 7) / repeat


def call_time(call: Callable[[], Any], repeat: int = 3) -> float:
    """Seconds of one call, median of all but the first. Definitions may wait for the host, so no graph holds them."""
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return median(times[1:])


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read plus written. Eagerly: in a graph it is another copy, and slower."""
    source = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / call_time(lambda: target.copy_(source), 6)


def ceilings() -> tuple[float, float]:
    """(bytes per second of a copy; operations per second of a bf16 product)."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in "ab")
    return copy_bandwidth(), 2 * 8192**3 / graph_time(lambda: a @ b, 5)


def measure(case: Case, tokens: int, module: str, limits: tuple[float, float], repeat: int) -> Result:
    variants = cycle(rotated(case))
    seconds = graph_time(lambda: next(variants).run(module), repeat)
    floor = max(case.num_bytes / limits[0], case.num_flops / limits[1])
    try:
        reference = call_time(lambda: case.run("reference")) / seconds
    except torch.OutOfMemoryError:
        reference = None
    return Result(
        case.op,
        case.name,
        tokens,
        seconds * 1e6,
        case.num_bytes / seconds / 1e9,
        case.num_flops / seconds / 1e12,
        floor / seconds,
        reference,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,64,4096")
    parser.add_argument("--ops", help="comma-separated; default: all")
    parser.add_argument("--module", default="triton_nvidia")
    parser.add_argument("--repeat", type=int, default=20, help="calls in a graph")
    parser.add_argument("--experts", type=int, default=Sizes.experts)
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU, found none")
    wanted = set(args.ops.split(",")) if args.ops else {case.op for case in cases(CHECKED, 1, "cuda")}
    check(wanted, args.module)
    limits = ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {version('triton')}")
    print(f"copy {limits[0] / 1e9:.0f} GB/s, bf16 product {limits[1] / 1e12:.0f} TFLOP/s")
    print(f"{'op':20} {'':16} {'tokens':>6} {'us':>9} {'GB/s':>6} {'TFLOP/s':>7} {'ceiling':>7} {'x ref':>6}")
    results = []
    for tokens in map(int, args.tokens.split(",")):
        for case in tqdm(cases(Sizes(experts=args.experts), tokens, "cuda"), desc=f"{tokens} tokens", unit=" cases"):
            if case.op not in wanted:
                continue
            result = measure(case, tokens, args.module, limits, args.repeat)
            results.append(result)
            reference = "" if result.times_reference is None else f"{result.times_reference:.1f}"
            tqdm.write(
                f"{case.op:20} {case.name:16} {tokens:6} {result.microseconds:9.1f} {result.gigabytes_per_second:6.0f} "
                f"{result.teraflops:7.1f} {result.share_of_ceiling:7.1%} {reference:>6}"
            )
    if args.json:
        head = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": version("triton")}
        body = {"copy": limits[0], "bf16": limits[1], "results": [asdict(result) for result in results]}
        Path(args.json).write_text(json.dumps(head | body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
