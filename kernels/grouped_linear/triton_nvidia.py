"""`grouped_linear` in Triton."""

import torch

from deepinfer_plugin.kernels.packed_weights import Fp8Weight
from deepinfer_plugin.kernels.triton_matmul import matmul


def grouped_linear(x: torch.Tensor, weight: torch.Tensor | Fp8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    return matmul(x, weight if isinstance(weight, Fp8Weight) else weight.flatten(0, 1), out_dtype)
