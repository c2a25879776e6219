"""The definition of `linear_fp8`: what every other module of this folder must equal."""

import torch

from deepinfer_plugin.kernels.packed_weights import Fp8Weight
from deepinfer_plugin.kernels.quant_formats import round_fp8
from deepinfer_plugin.kernels.row_gemm import row_gemm


def linear_fp8(
    x: torch.Tensor, weight: torch.Tensor | Fp8Weight, round_input: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    x, weight = x.float(), weight.decoded() if isinstance(weight, Fp8Weight) else weight
    return row_gemm(round_fp8(x) if round_input else x, weight).to(out_dtype)
