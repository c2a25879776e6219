"""`grouped_linear` in Triton."""

import torch

from deepinfer_plugin.kernels.fake_quant.triton_nvidia import round_fp8
from deepinfer_plugin.kernels.packed_weights import Fp8Weight
from deepinfer_plugin.kernels.triton_matmul import matmul


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor | Fp8Weight, round_input: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    if isinstance(weight, Fp8Weight):
        return matmul(x, weight, out_dtype, round_input)
    return matmul(round_fp8(x) if round_input else x, weight.flatten(0, 1), out_dtype)
