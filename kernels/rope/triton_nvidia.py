"""`rope` in Triton: a program per token and a few heads."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_formats import rounded_to_fp8
from deepinfer_plugin.kernels.triton_launch import chained, follow

BLOCK = 2048  # channels of a program


def rope(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool, round_to_fp8: bool) -> torch.Tensor:
    x = x if x.stride(2) == 1 else x.contiguous()
    num_tokens, num_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        width = triton.next_power_of_2(head_dim)
        heads = max(1, min(triton.next_power_of_2(num_heads), BLOCK // width))
        _rope[(num_tokens, triton.cdiv(num_heads, heads))](
            *(x, cos_sin, out, x.stride(0), x.stride(1), cos_sin.stride(0), num_heads, head_dim),
            *(head_dim - cos_sin.shape[1], inverse, heads, width, round_to_fp8),
            **chained(),
        )
    return out


@triton.jit
def _rope(
    x,
    cos_sin,
    out,
    x_token,
    x_head,
    cos_token,
    num_heads,
    head_dim,
    first,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUND: tl.constexpr,
):
    follow()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    inside = (head < num_heads) & (channel < head_dim)
    rotates = channel >= first
    place = channel - first
    half = (head_dim - first) // 2
    from_head = x + token * x_token + head * x_head
    value = tl.load(from_head + channel, inside, 0.0)
    partner = tl.load(from_head + first + (place ^ 1), inside & rotates, 0.0).to(tl.float32)
    angle = cos_sin + token * cos_token + (place >> 1)
    cos, sin = tl.load(angle, inside & rotates, 1.0), tl.load(angle + half, inside & rotates, 0.0)
    sin = tl.where(((place & 1) == 0) != INVERSE, -sin, sin)
    rotated = value.to(tl.float32) * cos + partner * sin
    result = tl.where(rotates, rotated.to(value.dtype), value)
    if ROUND:
        groups = tl.reshape(result.to(tl.float32), [HEADS, WIDTH // 32, 32])
        result = tl.reshape(rounded_to_fp8(groups, 2), [HEADS, WIDTH]).to(result.dtype)
    tl.store(out + (token * num_heads + head) * head_dim + channel, result, inside)
