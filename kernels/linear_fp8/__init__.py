"""The matrix product of an FP8 layer, whose input has been rounded to FP8."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch
from deepinfer_plugin.kernels.packed_weights import Fp8Weight

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def linear_fp8(x: torch.Tensor, weight: torch.Tensor | Fp8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Return ``x @ weight.T``, summed in fp32 and rounded once to `out_dtype`.

    Args:
        x: [num_tokens, K], bf16 or fp32, exact in bf16 beside a packed weight: rounded to FP8 (`round_fp8`) by whoever
            made it, or bf16 where that rounding is switched off.
        weight: [N, K], FP8, or fp32: the decoded FP8 weight.
        out_dtype: of the result; fp32 = not rounded.

    Returns:
        [num_tokens, N], `out_dtype`, contiguous. A row's result does not depend on the other rows.

    Raises:
        ValueError: shapes that do not fit, `weight` neither fp32 nor FP8, or a dtype that is not floating point.

    Source: model specification, section 4.3.
    """
    if x.dim() != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"linear_fp8: x must be [num_tokens, K] and weight [N, K], got {got}")
    if isinstance(weight, torch.Tensor) and weight.dtype != torch.float32:
        raise ValueError(f"linear_fp8: weight must be fp32 or packed FP8, got {weight.dtype}")
    if not (x.is_floating_point() and out_dtype.is_floating_point):
        raise ValueError(f"linear_fp8: x and out_dtype must be floating point, got {x.dtype} and {out_dtype}")
    return TABLE(x, weight, out_dtype)
