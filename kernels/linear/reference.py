"""The definition of `linear`: what every other module of this folder must equal."""

import torch

from deepinfer_plugin.kernels.row_gemm import row_gemm


def linear(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return row_gemm(x.float(), weight.float()).to(out_dtype)
