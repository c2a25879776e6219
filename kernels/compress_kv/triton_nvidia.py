"""`compress_kv` in Triton: a program a row."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_launch import chained, follow


def compress_kv(
    value: torch.Tensor,
    score: torch.Tensor | None,
    previous: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    num_tokens, width = value.shape
    rows = [None if t is None else t if t.stride(1) == 1 else t.contiguous() for t in (value, score, previous)]
    out = torch.empty(num_tokens, width, dtype=out_dtype, device=value.device)
    if num_tokens:
        _compress_kv[(num_tokens,)](
            *(*rows, norm_weight, out, *(0 if t is None else t.stride(0) for t in rows), width, eps),
            HAS_GATE=score is not None,
            BLOCK=triton.next_power_of_2(width),
            **chained(),
        )
    return out


@triton.jit
def _compress_kv(
    value,
    score,
    previous,
    norm_weight,
    out,
    value_stride,
    score_stride,
    previous_stride,
    width,
    eps,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    follow()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < width
    pooled = tl.load(value + row * value_stride + channel, inside, 0.0)
    if HAS_GATE:
        own = tl.load(score + row * score_stride + channel, inside, 0.0)
        before = previous + row * previous_stride + channel
        before_value, before_score = tl.load(before, inside, 0.0), tl.load(before + width, inside, 0.0)
        highest = tl.maximum(own, before_score)
        a, b = tl.exp(before_score - highest), tl.exp(own - highest)
        pooled = (a / (a + b)) * before_value + (b / (a + b)) * pooled
    pooled = pooled.to(out.dtype.element_ty).to(tl.float32)
    factor = tl.rsqrt(tl.sum(pooled * pooled) / width + eps)
    latent = pooled * factor * tl.load(norm_weight + channel, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + channel, latent.to(out.dtype.element_ty), inside)
