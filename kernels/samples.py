"""One small or large call of every op, with random inputs: for benchmarks, and for checks on hardware never seen."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepinfer_plugin.kernels.dispatch import tables
from deepinfer_plugin.kernels.packed_weights import Fp4Weight, Fp8Weight
from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.records import Record

MAX_ERROR = 1e-2  # bf16 operands and results; a wrong kernel is far above


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


SMALL = Sizes(
    **{"hidden": 128, "heads": 4, "head_dim": 64, "rope_dim": 16, "q_rank": 64, "o_groups": 2, "o_rank": 64},
    **{"window": 16, "topk": 16, "context": 256, "index_heads": 4, "index_dim": 32, "candidate_blocks": 8},
    **{"experts": 8, "top_k": 2, "expert_width": 64, "vocab": 160, "page": 16},
)


@dataclass
class Case:
    """One call of an op. num_bytes: what it must read and write; num_flops: what it must compute."""

    op: str
    name: str
    args: tuple[Any, ...]
    num_bytes: float
    num_flops: float = 0.0
    is_choice: bool = False  # the results are indices
    writes: int | None = None  # which argument holds the result

    def run(self, module: str) -> tuple[torch.Tensor, ...]:
        result = tables()[self.op].load(module)(*self.args)
        if self.writes is not None:
            return (self.args[self.writes],)
        return result if isinstance(result, tuple) else (result,)


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
    yield Case("rms_norm", "hidden", (x, make.normal(d), 1e-20, True), 4 * t * d)
    yield Case("round_fp8", "hidden", (x,), 4 * t * d)
    cos_sin = make.normal(t, sizes.rope_dim, **fp32)
    yield Case("rope", "query", (head, cos_sin, False, False), 4 * head.numel())
    yield Case("rope", "attended", (head, cos_sin, True, True), 4 * head.numel())
    gate_up = make.normal(t, 2 * sizes.expert_width, **fp32), 10.0, None, True
    yield Case("swiglu", "shared expert", gate_up, 10 * t * sizes.expert_width)
    coefficients = make.normal(t, m, **fp32), make.normal(t, m, m, **fp32)
    yield Case("mix_streams", "", (streams, x, *coefficients), 2 * (2 * m + 1) * t * d)
    mixing = streams, make.normal(t, d, **fp32), *coefficients, coefficients[0], make.normal(d), 1e-20, True
    yield Case("mix_collapse_norm", "", mixing, (4 * m + 4 + 4) * t * d)
    yield Case("collapse_streams", "", (streams, coefficients[0]), 2 * (m + 1) * t * d)
    logits = m * (2 + m)
    fn = make.normal(logits, m * d, **fp32) * 0.01
    coefficients_of = streams, fn, make.normal(3, **fp32), make.normal(logits, **fp32), 1e-20, 1e-6, 20
    yield Case("stream_coefficients", "", coefficients_of, 2 * m * t * d + 4 * fn.numel(), 2.0 * t * fn.numel())
    gate_bias = make.normal(sizes.experts, **fp32)
    gate = make.normal(t, sizes.experts, **fp32), gate_bias, gate_bias, None, sizes.top_k, 1.5, None
    yield Case("moe_gate", "", gate, 4 * t * sizes.experts, is_choice=True)

    for op, width in (("round_fp4_index", sizes.index_dim), ("round_fp4_kv", sizes.head_dim)):
        yield Case(op, "", (make.normal(t, width),), 4 * t * width)
    norm = make.normal(sizes.head_dim)
    value, score, previous = (make.normal(t, width * sizes.head_dim, **fp32) for width in (1, 1, 2))
    pooled = value, score, previous, norm, 1e-20, torch.bfloat16
    yield Case("compress_kv", "", pooled, 18 * t * sizes.head_dim)
    slots = torch.randperm(-(-t // sizes.page) * sizes.page, generator=make.generator, device=device)[:t]
    for record in Record:
        dtype = torch.bfloat16 if record is Record.PLAIN else torch.uint8
        size = record.num_bytes(sizes.head_dim)
        cache = torch.zeros(-(-t // sizes.page), sizes.page, size, dtype=dtype, device=device)
        stored = make.normal(t, sizes.head_dim), cache, slots, record
        num_bytes = t * (2 * sizes.head_dim + size * cache.element_size())
        yield Case("store_kv_cache", record.value, stored, num_bytes, writes=1)
    for record, width in ((Record.FP8, sizes.head_dim), (Record.FP4_INDEX, sizes.index_dim)):
        cache = torch.zeros(-(-t // sizes.page), sizes.page, record.num_bytes(width), dtype=torch.uint8, device=device)
        key = make.normal(t, width), make.normal(width), 1e-20, cos_sin, cache, slots, record, Record.PLAIN
        num_bytes = t * (2 * width + 4 * sizes.rope_dim + record.num_bytes(width))
        yield Case("norm_rope_store", record.value, key, num_bytes, writes=4)
    of_request = make.pages(sizes.context, sizes.index_dim, Record.FP4_INDEX)
    states = make.integers(0, sizes.context, t)
    yield Case("cache_slots", "", (of_request, states), 28 * t, is_choice=True)
    orders, heads = 3, 8
    primes = torch.full((orders, heads), 16381, device=device)
    offsets = torch.arange(orders * heads, device=device) * 16381
    classes, multipliers = make.integers(0, 1000, t, orders + 1), make.integers(1, 2**30, orders + 1)
    hashed = classes, multipliers, primes, offsets
    yield Case("engram_hash", "", hashed, 8 * t * (orders * heads + orders + 1), is_choice=True)
    table = make.normal(16384, 256).to(torch.float8_e4m3fn)
    table_sf = make.integers(118, 122, 16384, 8, dtype=torch.uint8)
    looked_up = make.integers(0, 16384, t, orders * heads), table, table_sf, 0
    yield Case("engram_lookup", "", looked_up, t * orders * heads * (264 + 4 * 256))
    gated = streams, make.normal(t, m + 1, d), make.normal(m, d), make.normal(m, d), 1e-20, None
    yield Case("engram_gate", "", gated, 2 * (3 * m + 1) * t * d)

    for name, n, k in (
        ("wq_a + wkv", sizes.q_rank + sizes.head_dim, d),
        ("wq_b", sizes.heads * sizes.head_dim, sizes.q_rank),
        ("wo_b", d, sizes.o_groups * sizes.o_rank),
        ("shared w1 + w3", 2 * sizes.expert_width, d),
    ):
        weight = make.fp8_weight(n, k)
        num_bytes = weight.codes.numel() + weight.sf.numel() + 2 * t * (n + k)
        yield Case("linear_fp8", name, (make.normal(t, k), weight, torch.bfloat16), num_bytes, 2.0 * t * n * k)
    group_width = sizes.heads * sizes.head_dim // sizes.o_groups
    weight = make.fp8_weight(sizes.o_groups * sizes.o_rank, group_width)
    grouped = make.normal(t, sizes.o_groups, group_width)
    num_bytes = weight.codes.numel() + 2 * t * (grouped[0].numel() + weight.shape[0])
    flops = 2.0 * t * weight.codes.numel()
    yield Case("grouped_linear", "wo_a", (grouped, weight, torch.bfloat16, True), num_bytes, flops)
    for name, n in (("router", sizes.experts), ("head", sizes.vocab)):
        plain = make.normal(n, d)
        num_bytes = 2 * plain.numel() + t * (2 * d + 4 * n)
        yield Case("linear", name, (x, plain, torch.float32), num_bytes, 2.0 * t * plain.numel())
    del weight, plain
    logits = make.normal(t, sizes.vocab, **fp32)
    rows = torch.ones(t, device=device), make.integers(0, 2**62, t), make.integers(0, 2**20, t)
    top_k, top_p = torch.full((t,), 64, dtype=torch.int32, device=device), torch.full((t,), 0.9, device=device)
    for name, limits in (("no limits", (None, None, None)), ("top-k, top-p", (top_k, top_p, None))):
        sampled = logits, *rows, *limits, 0
        yield Case("sample_tokens", name, sampled, 4 * logits.numel(), is_choice=True)
    survival = torch.rand(t, 5, generator=make.generator, device=device).cumprod(1)
    chosen, first_rows = make.integers(0, 2, 6 * t), torch.arange(0, 6 * t + 1, 6, dtype=torch.int32, device=device)
    yield Case("accept_drafts", "five", (chosen, chosen.roll(1), first_rows, 6), 22 * 6 * t, is_choice=True)
    yield Case("verify_budget", "half of them", (survival, t * 5 // 2), 4 * survival.numel() + 4 * t, is_choice=True)

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
    blocks = query, head_weights, keys, visible
    size = sizes.candidate_blocks
    places = int(visible.sum())
    flops = 2.0 * places * sizes.index_heads * sizes.index_dim
    yield Case("topk_candidate_blocks", "", (*blocks, size, 8), places * key_bytes, flops, is_choice=True)
    both = *blocks, sizes.topk, size, 8
    yield Case("index_topk_with_candidates", "", both, places * key_bytes, flops, is_choice=True)


def error_of(case: Case, module: str) -> float:
    """Of the results of `module` against the definition's, on the first tokens."""
    got, want = _apart(case).run(module), _apart(case).run("reference")
    if case.is_choice:
        indices = [(a, b) for a, b in zip(got, want, strict=True) if not b.is_floating_point()]
        pairs = [tuple(part.view(len(part), -1).tolist() for part in both) for both in indices]
        missed = sum(len(set(b) - set(a)) for rows in pairs for a, b in zip(*rows, strict=True))
        return missed / max(1, sum(len(row) for _, rows in pairs for row in rows))
    differences = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(got, want, strict=True)]
    return float(max(differences))


def _apart(case: Case) -> Case:
    """The case with an argument of its own to write to."""
    if case.writes is None:
        return case
    args = list(case.args)
    args[case.writes] = args[case.writes].clone()
    return replace(case, args=tuple(args))


def wrong_result(op: str, module: str, device: str = "cuda") -> str | None:
    """What is wrong with `module` on small inputs, or None."""
    for tokens in (1, 5):
        for case in cases(SMALL, tokens, device):
            if case.op == op:
                try:
                    error = error_of(case, module)
                except Exception as failure:  # of a compiler, a driver or a launch: whatever it is, it is not a result
                    return f"{case.name or 'it'} failed with {type(failure).__name__}: {failure}"
                if not error <= MAX_ERROR:
                    return f"{case.name or 'its result'} is off by {error:.1e}"
    return None
