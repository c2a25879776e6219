"""The hyper-connection ops in Triton.

`stream_coefficients` cuts its long sum into pieces of CHUNK elements, one program each, whose results a second kernel
adds in order: the same bits for one row and for a thousand.
"""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_formats import row_rounded_to_fp8
from deepinfer_plugin.kernels.triton_launch import chained, fetch_ahead, follow

BLOCK = 1024  # channels of a program of the elementwise ops
CHUNK, DEPTH = 128, 64  # elements of a piece of the coefficients' sums, and of a step
MIN_TOKENS, MAX_TOKENS, FP32_TOKENS = 8, 64, 16  # that a program of those sums takes


def mix_streams(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    num_tokens, num_streams, hidden_size = streams.shape
    streams, y = streams.contiguous(), y.contiguous()
    out = torch.empty_like(streams)
    if out.numel():
        _mix_streams[(num_tokens, triton.cdiv(hidden_size, BLOCK))](
            *(streams, y, post.contiguous(), comb.contiguous(), out, hidden_size, num_streams, BLOCK), **chained()
        )
    return out


@triton.jit
def _mix_streams(streams, y, post, comb, out, hidden_size, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    follow()
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < hidden_size
    injected = tl.load(y + token * hidden_size + channel, inside, 0.0).to(streams.dtype.element_ty).to(tl.float32)
    first = streams + token * STREAMS * hidden_size + channel
    for j in tl.static_range(STREAMS):
        mixed = tl.load(post + token * STREAMS + j) * injected
        for i in tl.static_range(STREAMS):
            factor = tl.load(comb + (token * STREAMS + i) * STREAMS + j)
            mixed += factor * tl.load(first + i * hidden_size, inside, 0.0).to(tl.float32)
        place = out + (token * STREAMS + j) * hidden_size + channel
        tl.store(place, mixed.to(out.dtype.element_ty), inside)


def mix_collapse_norm(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre_mix: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    round_to_fp8: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, num_streams, hidden_size = streams.shape
    streams, y = streams.contiguous(), y.contiguous()
    mixed, hidden = torch.empty_like(streams), torch.empty(y.shape, dtype=streams.dtype, device=streams.device)
    rounded = torch.empty_like(hidden) if round_to_fp8 else hidden
    if mixed.numel():
        block = triton.next_power_of_2(hidden_size)
        _mix_collapse_norm[(num_tokens,)](
            *(streams, y, post.contiguous(), comb.contiguous(), pre_mix.contiguous(), weight, mixed, hidden),
            *(rounded, hidden_size, eps, num_streams, block, round_to_fp8),
            num_warps=min(16, max(1, block // 512)),
            **chained(),
        )
    return mixed, hidden, rounded


@triton.jit
def _mix_collapse_norm(
    streams,
    y,
    post,
    comb,
    pre_mix,
    weight,
    mixed_streams,
    hidden,
    rounded,
    hidden_size,
    eps,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
):
    follow()
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < hidden_size
    injected = tl.load(y + token * hidden_size + channel, inside, 0.0).to(streams.dtype.element_ty).to(tl.float32)
    first = streams + token * STREAMS * hidden_size + channel
    collapsed = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(STREAMS):
        mixed = tl.load(post + token * STREAMS + j) * injected
        for i in tl.static_range(STREAMS):  # the same loads for every j, which the compiler does once
            factor = tl.load(comb + (token * STREAMS + i) * STREAMS + j)
            mixed += factor * tl.load(first + i * hidden_size, inside, 0.0).to(tl.float32)
        mixed = mixed.to(streams.dtype.element_ty)
        tl.store(mixed_streams + (token * STREAMS + j) * hidden_size + channel, mixed, inside)
        collapsed += tl.load(pre_mix + token * STREAMS + j) * mixed.to(tl.float32)
    collapsed = collapsed.to(streams.dtype.element_ty).to(tl.float32)
    factor = tl.rsqrt(tl.sum(collapsed * collapsed) / hidden_size + eps)
    scaled = collapsed * factor * tl.load(weight + channel, inside, 0.0).to(tl.float32)
    scaled = scaled.to(hidden.dtype.element_ty)
    tl.store(hidden + token * hidden_size + channel, scaled, inside)
    if ROUND:
        scaled = row_rounded_to_fp8(scaled.to(tl.float32)).to(scaled.dtype)
        tl.store(rounded + token * hidden_size + channel, scaled, inside)


def collapse_streams(streams: torch.Tensor, pre_mix: torch.Tensor) -> torch.Tensor:
    num_tokens, num_streams, hidden_size = streams.shape
    out = torch.empty(num_tokens, hidden_size, dtype=streams.dtype, device=streams.device)
    if out.numel():
        _collapse_streams[(num_tokens, triton.cdiv(hidden_size, BLOCK))](
            *(streams.contiguous(), pre_mix.contiguous(), out, hidden_size, num_streams, BLOCK), **chained()
        )
    return out


@triton.jit
def _collapse_streams(streams, pre_mix, out, hidden_size, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    follow()
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < hidden_size
    collapsed = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(STREAMS):
        stream = tl.load(streams + (token * STREAMS + i) * hidden_size + channel, inside, 0.0).to(tl.float32)
        collapsed += tl.load(pre_mix + token * STREAMS + i) * stream
    tl.store(out + token * hidden_size + channel, collapsed.to(out.dtype.element_ty), inside)


def stream_coefficients(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, m, hidden_size = streams.shape
    if m & (m - 1):
        raise NotImplementedError(
            f"stream_coefficients: in Triton the number of streams must be a power of two, got {m}"
        )
    width, num_logits = m * hidden_size, m * (2 + m)
    chunks, block = triton.cdiv(width, CHUNK), max(16, triton.next_power_of_2(num_logits + 1))
    options = {"dtype": torch.float32, "device": streams.device}
    sums = torch.empty(num_tokens, chunks, block, **options)
    pre, post = torch.empty(num_tokens, m, **options), torch.empty(num_tokens, m, **options)
    comb = torch.empty(num_tokens, m, m, **options)
    if num_tokens:
        exact = streams.dtype == torch.bfloat16
        tokens = min(MAX_TOKENS, max(MIN_TOKENS, triton.next_power_of_2(num_tokens))) if exact else FP32_TOKENS
        _coefficient_sums[(triton.cdiv(num_tokens, tokens), chunks)](
            *(streams.contiguous(), fn.contiguous(), sums, num_tokens, width, num_logits, chunks),
            EXACT=exact,
            TOKENS=tokens,
            CHUNK=CHUNK,
            DEPTH=DEPTH,
            BLOCK=block,
            num_warps=4,
            **chained(),
        )
        _coefficients[(num_tokens,)](
            *(sums, scale, base, pre, post, comb, width, chunks, norm_eps, hc_eps, num_iters, m, block),
            CHUNKS=triton.next_power_of_2(chunks),
            num_warps=4,
            **chained(),
        )
    return pre, post, comb


@triton.jit
def _coefficient_sums(
    streams,
    fn,
    sums,
    num_tokens,
    width,
    num_logits,
    num_chunks,
    EXACT: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of one chunk of some rows: its product with every row of `fn`, and, one place behind them, its sum of squares.

    EXACT: streams are bf16. A number of `fn` is three bf16 ones, and a bf16 number's square is two: every product is
    exact, as in fp32, and tensor cores add them.
    """
    chunk = tl.program_id(1)
    logit = tl.arange(0, BLOCK)
    rows = fn + tl.minimum(logit, num_logits - 1)[:, None] * width
    fetch_ahead(rows + tl.minimum(chunk * CHUNK + 32 * tl.arange(0, CHUNK // 32), width - 1)[None, :])
    follow()
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    present = token < num_tokens
    total = tl.zeros([BLOCK, TOKENS], tl.float32)
    for first in range(chunk * CHUNK, (chunk + 1) * CHUNK, DEPTH):
        element = first + tl.arange(0, DEPTH)
        inside = (element < width)[None, :]
        factors = tl.load(rows + element[None, :], (logit < num_logits)[:, None] & inside, 0.0)
        v = tl.load(streams + token[:, None] * width + element[None, :], present[:, None] & inside, 0.0)
        squares = v.to(tl.float32) * v.to(tl.float32)
        last = tl.where((logit == num_logits)[:, None] & inside, 1.0, 0.0)
        if EXACT:
            v = tl.trans(v)
            for _ in tl.static_range(3):  # the largest part first: the others are what it leaves
                part = factors.to(tl.bfloat16)
                total = tl.dot(part, v, total)
                factors -= part.to(tl.float32)
            for _ in tl.static_range(2):
                part = squares.to(tl.bfloat16)
                total = tl.dot(last.to(tl.bfloat16), tl.trans(part), total)
                squares -= part.to(tl.float32)
        else:
            total = tl.dot(factors, tl.trans(v), total, input_precision="ieee")
            total = tl.dot(last, tl.trans(squares), total, input_precision="ieee")
    place = sums + (token[None, :] * num_chunks + chunk) * BLOCK + logit[:, None]
    tl.store(place, total, present[None, :] & (logit <= num_logits)[:, None])


@triton.jit
def _coefficients(
    sums,
    scale,
    base,
    pre,
    post,
    comb,
    width,
    num_chunks,
    norm_eps,
    hc_eps,
    num_iters,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    follow()
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, M)
    square = 2 * M + stream[:, None] * M + stream[None, :]
    chunk = tl.arange(0, CHUNKS)
    there = chunk < num_chunks
    place = sums + (token * num_chunks + chunk) * BLOCK
    a = tl.sum(tl.load(place[:, None] + stream[None, :], there[:, None], 0.0), 0)
    b = tl.sum(tl.load(place[:, None] + M + stream[None, :], there[:, None], 0.0), 0)
    c = tl.sum(tl.load(place[:, None, None] + square[None, :, :], there[:, None, None], 0.0), 0)
    squares = tl.sum(tl.load(place + 2 * M + M * M, there, 0.0), 0)
    factor = tl.rsqrt(squares / width + norm_eps)
    a = a * factor * tl.load(scale) + tl.load(base + stream)
    b = b * factor * tl.load(scale + 1) + tl.load(base + M + stream)
    c = c * factor * tl.load(scale + 2) + tl.load(base + square)
    tl.store(pre + token * M + stream, 1 / (1 + tl.exp(-a)) + hc_eps)
    tl.store(post + token * M + stream, 2 / (1 + tl.exp(-b)))
    c = tl.exp(c - tl.max(c, 1)[:, None])
    c = c / tl.sum(c, 1)[:, None] + hc_eps
    c = c / (tl.sum(c, 0)[None, :] + hc_eps)
    for _ in range(num_iters - 1):
        c = c / (tl.sum(c, 1)[:, None] + hc_eps)
        c = c / (tl.sum(c, 0)[None, :] + hc_eps)
    tl.store(comb + token * M * M + (square - 2 * M), c)
