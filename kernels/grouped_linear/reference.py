"""The definition of `grouped_linear`: what every other module of this folder must equal."""

import torch

from deepinfer_plugin.kernels.packed_weights import Fp8Weight
from deepinfer_plugin.kernels.quant_formats import round_fp8
from deepinfer_plugin.kernels.row_gemm import row_gemm


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor | Fp8Weight, out_dtype: torch.dtype, round_output: bool
) -> torch.Tensor:
    if isinstance(weight, Fp8Weight):
        weight = weight.decoded().unflatten(0, (x.shape[1], -1))
    products = [row_gemm(rows.float(), w.float()) for rows, w in zip(x.unbind(1), weight, strict=True)]
    out = torch.stack(products, dim=1).to(out_dtype)
    return round_fp8(out) if round_output else out
