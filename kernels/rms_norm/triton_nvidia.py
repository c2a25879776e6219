"""`rms_norm` in Triton: a program a row."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_formats import row_rounded_to_fp8
from deepinfer_plugin.kernels.triton_launch import chained, follow


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, round_to_fp8: bool) -> torch.Tensor:
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if rows.shape[0]:
        block = triton.next_power_of_2(width)
        _rms_norm[(rows.shape[0],)](
            *(rows, weight, out, rows.stride(0), width, eps),
            BLOCK=block,
            ROUND=round_to_fp8,
            num_warps=min(8, max(1, block // 512)),
            **chained(),
        )
    return out.view(x.shape)


@triton.jit
def _rms_norm(x, weight, out, stride, width, eps, BLOCK: tl.constexpr, ROUND: tl.constexpr):
    follow()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * stride + columns, inside, 0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values) / width + eps)
    scaled = values * factor * tl.load(weight + columns, inside, 0.0).to(tl.float32)
    scaled = scaled.to(out.dtype.element_ty)
    if ROUND:
        scaled = row_rounded_to_fp8(scaled.to(tl.float32)).to(scaled.dtype)
    tl.store(out + row * width + columns, scaled, inside)
