"""`linear_fp8` in Triton."""

import torch

from deepinfer_plugin.kernels.fake_quant.triton_nvidia import round_fp8
from deepinfer_plugin.kernels.packed_weights import Fp8Weight
from deepinfer_plugin.kernels.triton_matmul import matmul


def linear_fp8(
    x: torch.Tensor, weight: torch.Tensor | Fp8Weight, round_input: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    if not isinstance(weight, Fp8Weight):
        return matmul((round_fp8(x) if round_input else x).unsqueeze(1), weight, out_dtype).squeeze(1)
    return matmul(x.unsqueeze(1), weight, out_dtype, round_input).squeeze(1)
