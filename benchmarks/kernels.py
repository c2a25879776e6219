"""Check and time every GPU kernel at V4.1's shapes against its definition and the card's own ceilings.

python -m benchmarks.kernels [--tokens 1,64,4096] [--ops linear_fp8,moe_experts] [--module triton_nvidia] [--json FILE]

Ceilings are measured first: a large copy, and a large bf16 product. Each case runs `--repeat` times inside one CUDA
graph. Errors come first, at smaller sizes: the norm of the difference to the definition over the norm of the
definition; of chosen indices, the share that differs.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from deepinfer_plugin.kernels.dispatch import tables
from deepinfer_plugin.kernels.packed_weights import Fp4Weight, Fp8Weight
from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.records import Record

MAX_ERROR = 1e-2  # bf16 operands and results; a wrong kernel is far above
CHECKED_TOKENS = (1, 33)
CACHE_BYTES = 200e6


@dataclass(frozen=True)
class Sizes:
    """The shapes that kernels see. The defaults are V4.1-Flash's."""

    hidden: int = 5120
    heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    q_rank: int = 1280
    o_groups: int = 8
    o_rank: int = 1024
    window: int = 128
    topk: int = 512
    context: int = 65536  # entries of global memory
    index_heads: int = 32
    index_dim: int = 128
    candidate_blocks: int = 2048
    experts: int = 384
    top_k: int = 6
    expert_width: int = 2304
    streams: int = 4
    vocab: int = 129280
    page: int = 64  # states of a block


CHECKED = Sizes(context=4096, experts=32, vocab=4096, candidate_blocks=128)  # definitions need much memory


@dataclass
class Case:
    """One call of an op. num_bytes: what it must read and write; num_flops: what it must compute."""

    op: str
    name: str
    args: tuple[Any, ...]
    num_bytes: float
    num_flops: float = 0.0
    is_choice: bool = False  # the results are indices

    def run(self, module: str) -> tuple[torch.Tensor, ...]:
        result = tables()[self.op].load(module)(*self.args)
        return result if isinstance(result, tuple) else (result,)


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


class Inputs:
    """Random inputs on one device, reproducible."""

    def __init__(self, sizes: Sizes, tokens: int, device: str) -> None:
        self.sizes, self.tokens, self.device = sizes, tokens, device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def fp8_weight(self, n: int, k: int) -> Fp8Weight:
        codes = self.integers(0, 0x7F, n, k, dtype=torch.uint8) | (self.integers(0, 2, n, k, dtype=torch.uint8) << 7)
        return Fp8Weight(codes, self.integers(105, 110, -(-n // 32), k // 32, dtype=torch.uint8)).interleave()

    def fp4_weight(self, count: int, n: int, k: int) -> Fp4Weight:
        codes = self.integers(0, 256, count, n, k // 2, dtype=torch.uint8)
        return Fp4Weight(codes, self.integers(118, 122, count, n, k // 32, dtype=torch.uint8)).interleave(in_place=True)

    def routes(self) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.rand(self.tokens, self.sizes.experts, generator=self.generator, device=self.device)
        ids = scores.topk(self.sizes.top_k).indices.sort().values
        return ids, torch.full(ids.shape, 1 / self.sizes.top_k, device=self.device)

    def pages(self, states: int, width: int, record: Record) -> Pages:
        """One request's cache, its blocks shuffled; every token reads it."""
        page = self.sizes.page
        blocks = -(-states // page)
        cache = record.encode(self.normal(blocks * page, width)).view(blocks, page, -1)
        table = torch.randperm(blocks, generator=self.generator, device=self.device).int().unsqueeze(0)
        return Pages(cache, table, torch.zeros(self.tokens, dtype=torch.int64, device=self.device), record)

    def entries(self, count: int, below: int) -> torch.Tensor:
        """[tokens, count] different numbers, ascending."""
        steps = self.integers(1, max(2, below // count), self.tokens, count)
        return (steps.cumsum(1) - 1).int()


def cases(sizes: Sizes, tokens: int, device: str) -> Iterator[Case]:
    """Every op of the text path, one after the other, so that only one's inputs exist."""
    make, t, d = Inputs(sizes, tokens, device), tokens, sizes.hidden
    x, head = make.normal(t, d), make.normal(t, sizes.heads, sizes.head_dim)
    streams, m = make.normal(t, sizes.streams, d), sizes.streams
    fp32 = {"dtype": torch.float32}
    yield Case("rms_norm", "hidden", (x, make.normal(d), 1e-20), 4 * t * d)
    yield Case("round_fp8", "hidden", (x,), 4 * t * d)
    cos_sin = make.normal(t, sizes.rope_dim, **fp32)
    yield Case("rope", "query", (head, cos_sin, False), 4 * head.numel())
    yield Case(
        "swiglu", "shared expert", (make.normal(t, 2 * sizes.expert_width), 10.0, None), 8 * t * sizes.expert_width
    )
    coefficients = make.normal(t, m, **fp32), make.normal(t, m, m, **fp32)
    yield Case("mix_streams", "", (streams, x, *coefficients), 2 * (2 * m + 1) * t * d)
    mixing = streams, make.normal(t, d, **fp32), *coefficients, coefficients[0], make.normal(d), 1e-20
    yield Case("mix_collapse_norm", "", mixing, (4 * m + 2 + 4) * t * d)
    yield Case("collapse_streams", "", (streams, coefficients[0]), 2 * (m + 1) * t * d)
    logits = m * (2 + m)
    fn = make.normal(logits, m * d, **fp32) * 0.01
    mixing = streams, fn, make.normal(3, **fp32), make.normal(logits, **fp32), 1e-20, 1e-6, 20
    yield Case("stream_coefficients", "", mixing, 2 * m * t * d + 4 * fn.numel(), 2.0 * t * fn.numel())
    gate_bias = make.normal(sizes.experts, **fp32)
    gate = make.normal(t, sizes.experts, **fp32), gate_bias, gate_bias, None, sizes.top_k, 1.5
    yield Case("moe_gate", "", gate, 4 * t * sizes.experts, is_choice=True)

    for name, n, k in (
        ("wq_a + wkv", sizes.q_rank + sizes.head_dim, d),
        ("wq_b", sizes.heads * sizes.head_dim, sizes.q_rank),
        ("wo_b", d, sizes.o_groups * sizes.o_rank),
        ("shared w1 + w3", 2 * sizes.expert_width, d),
    ):
        weight = make.fp8_weight(n, k)
        num_bytes = weight.codes.numel() + weight.sf.numel() + 2 * t * (n + k)
        yield Case("linear_fp8", name, (make.normal(t, k), weight, True, torch.bfloat16), num_bytes, 2.0 * t * n * k)
    group_width = sizes.heads * sizes.head_dim // sizes.o_groups
    weight = make.fp8_weight(sizes.o_groups * sizes.o_rank, group_width)
    grouped = make.normal(t, sizes.o_groups, group_width)
    num_bytes = weight.codes.numel() + 2 * t * (grouped[0].numel() + weight.shape[0])
    flops = 2.0 * t * weight.codes.numel()
    yield Case("grouped_linear", "wo_a", (grouped, weight, True, torch.bfloat16), num_bytes, flops)
    for name, n in (("router", sizes.experts), ("head", sizes.vocab)):
        plain = make.normal(n, d)
        num_bytes = 2 * plain.numel() + t * (2 * d + 4 * n)
        yield Case("linear", name, (x, plain, torch.float32), num_bytes, 2.0 * t * plain.numel())
    del weight, plain

    w13 = make.fp4_weight(sizes.experts, 2 * sizes.expert_width, d)
    w2 = make.fp4_weight(sizes.experts, d, sizes.expert_width)
    ids, route_weights = make.routes()
    reached = ids.unique().numel() / sizes.experts
    packed = sum(part.numel() for w in (w13, w2) for part in (w.codes, w.sf))
    flops = 6.0 * t * sizes.top_k * d * sizes.expert_width
    experts = x, w13, w2, ids, route_weights, 0, 10.0, True
    yield Case("moe_experts", f"{reached:.0%} of experts", experts, reached * packed + 6 * t * d, flops)
    del w13, w2, experts

    positions = make.integers(sizes.window - 1, sizes.context // 2, t)
    local = make.pages(sizes.context // 2, sizes.head_dim, Record.FP8)
    for record in (Record.FP8, Record.FP4_KV):
        shared = make.pages(sizes.context, sizes.head_dim, record)
        chosen = make.entries(sizes.topk, sizes.context)
        sink = make.normal(sizes.heads, **fp32)
        attention = head, local, positions, sizes.window, shared, chosen, sink, sizes.head_dim**-0.5
        row_bytes = sizes.window * Record.FP8.num_bytes(sizes.head_dim) + sizes.topk * record.num_bytes(sizes.head_dim)
        flops = 4.0 * head.numel() * (sizes.window + sizes.topk)
        yield Case("sparse_attention", record.value, attention, t * row_bytes + 4 * head.numel(), flops)
    del local, shared, attention

    keys = make.pages(sizes.context, sizes.index_dim, Record.FP4_INDEX)
    query, visible = (
        make.normal(t, sizes.index_heads, sizes.index_dim),
        make.integers(sizes.context // 2, sizes.context, t),
    )
    head_weights = make.normal(t, sizes.index_heads)
    key_bytes = Record.FP4_INDEX.num_bytes(sizes.index_dim) + 8  # a score written and read
    for name, candidates in (
        ("all entries", None),
        ("candidates", make.entries(sizes.candidate_blocks, sizes.context // 16)),
    ):
        places = int(visible.sum()) if candidates is None else t * sizes.candidate_blocks * 8
        search = query, head_weights, keys, visible, sizes.topk, candidates, 8
        flops = 2.0 * places * sizes.index_heads * sizes.index_dim
        yield Case("index_topk", name, search, places * key_bytes, flops, is_choice=True)


def error_of(case: Case, module: str) -> float:
    """Of the results of `module` against the definition's, on the first tokens."""
    got, want = case.run(module), case.run("reference")
    if case.is_choice:
        rows = zip(got[0].tolist(), want[0].tolist(), strict=True)
        missed = sum(len(set(b) - set(a)) for a, b in rows)
        return missed / max(1, want[0].numel())
    differences = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(got, want, strict=True)]
    return float(max(differences))


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


def ceilings() -> tuple[float, float]:
    """(bytes per second of a copy, read plus written; operations per second of a bf16 product)."""
    source = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    copy = 2 * source.numel() * 4 / call_time(lambda: target.copy_(source), 6)  # in a graph it is another copy, slower
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in "ab")
    return copy, 2 * 8192**3 / graph_time(lambda: a @ b, 5)


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
