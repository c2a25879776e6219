"""`linear_fp8` in Triton."""

import torch

from deepinfer_plugin.kernels.packed_weights import Fp8Weight
from deepinfer_plugin.kernels.triton_matmul import matmul


def linear_fp8(x: torch.Tensor, weight: torch.Tensor | Fp8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    return matmul(x.unsqueeze(1), weight, out_dtype).squeeze(1)
