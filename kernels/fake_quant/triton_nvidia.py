"""The round trips in Triton: a program per 32 groups."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_formats import (
    fp4_group_sf,
    fp4_kv_group_sf,
    reciprocal_of_power,
    round_e2m1,
    rounded_to_fp8,
)
from deepinfer_plugin.kernels.triton_launch import chained, follow

GROUPS = 32


def round_fp8(x: torch.Tensor) -> torch.Tensor:
    return _rounded(x, "fp8", 32)


def round_fp4_index(x: torch.Tensor) -> torch.Tensor:
    return _rounded(x, "fp4_index", 32)


def round_fp4_kv(x: torch.Tensor) -> torch.Tensor:
    return _rounded(x, "fp4_kv", 16)


def _rounded(x: torch.Tensor, form: str, group_size: int) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    num_groups = x.numel() // group_size
    if num_groups:
        _round[(triton.cdiv(num_groups, GROUPS),)](
            x, out, num_groups, form, group_size, GROUPS, num_warps=2, **chained()
        )
    return out


@triton.jit
def _round(x, out, num_groups, FORM: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr):
    follow()
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    element = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    inside = (group < num_groups)[:, None]
    values = tl.load(x + element, inside, 0.0).to(tl.float32)
    amax = tl.max(tl.abs(values), 1)
    if FORM == "fp8":
        rounded = rounded_to_fp8(values, 1)
    elif FORM == "fp4_index":
        sf = fp4_group_sf(amax)[:, None]
        rounded = round_e2m1(values * reciprocal_of_power(sf)) * sf
    else:
        sf = fp4_kv_group_sf(amax)[:, None]
        rounded = round_e2m1(values * tl.div_rn(1.0, sf)) * sf
    tl.store(out + element, rounded.to(out.dtype.element_ty), inside)
