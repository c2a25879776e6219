"""`grouped_linear` in Triton."""

import torch

from deepinfer_plugin.kernels.fake_quant.triton_nvidia import round_fp8
from deepinfer_plugin.kernels.packed_weights import Fp8Weight
from deepinfer_plugin.kernels.triton_matmul import matmul


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor | Fp8Weight, out_dtype: torch.dtype, round_output: bool
) -> torch.Tensor:
    if isinstance(weight, Fp8Weight):
        return matmul(x, weight, out_dtype, round_output)
    out = matmul(x, weight.flatten(0, 1), out_dtype)
    return round_fp8(out) if round_output else out
