"""The definition of `linear_fp8`: what every other module of this folder must equal."""

import torch

from deepinfer_plugin.kernels.packed_weights import Fp8Weight
from deepinfer_plugin.kernels.row_gemm import row_gemm


def linear_fp8(x: torch.Tensor, weight: torch.Tensor | Fp8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    return row_gemm(x.float(), weight.decoded() if isinstance(weight, Fp8Weight) else weight).to(out_dtype)
