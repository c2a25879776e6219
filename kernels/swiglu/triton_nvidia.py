"""`swiglu` in Triton: a program per row and 512 channels."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_formats import row_rounded_to_fp8
from deepinfer_plugin.kernels.triton_launch import chained, follow

BLOCK = 512


def swiglu(gate_up: torch.Tensor, limit: float, route_weights: torch.Tensor | None, round_to_fp8: bool) -> torch.Tensor:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    dtype = torch.bfloat16 if round_to_fp8 else torch.float32
    out = torch.empty(num_tokens, width, dtype=dtype, device=gate_up.device)
    if out.numel():
        _swiglu[(num_tokens, triton.cdiv(width, BLOCK))](
            *(gate_up, route_weights, out, gate_up.stride(0), width, limit),
            HAS_WEIGHTS=route_weights is not None,
            ROUND=round_to_fp8,
            BLOCK=BLOCK,
            **chained(),
        )
    return out


@triton.jit
def _swiglu(
    gate_up,
    route_weights,
    out,
    stride,
    width,
    limit,
    HAS_WEIGHTS: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    follow()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, inside, 0.0).to(tl.float32)
    activation = clamped_swiglu(gate, up, limit)
    if HAS_WEIGHTS:
        activation *= tl.load(route_weights + row)
    if ROUND:
        activation = row_rounded_to_fp8(activation)
    tl.store(out + row * width + column, activation.to(out.dtype.element_ty), inside)


@triton.jit
def clamped_swiglu(gate, up, limit):
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` of fp32 values."""
    gate = tl.minimum(gate, limit)
    return gate / (1 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)
