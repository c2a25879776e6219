"""The matrix product of an FP8 layer: input rounded to FP8, weight decoded from FP8."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch
from deepinfer_plugin.kernels.packed_weights import Fp8Weight

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def linear_fp8(
    x: torch.Tensor, weight: torch.Tensor | Fp8Weight, round_input: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return ``round_fp8(x) @ weight.T``, summed in fp32 and rounded once to `out_dtype`.

    Args:
        x: [num_tokens, K], bf16 or fp32, K a multiple of 32 where it is rounded.
        weight: [N, K], FP8, or fp32: the decoded FP8 weight.
        round_input: False = multiply x as it is (x holds FP8 values already, or quantisation is switched off).
        out_dtype: of the result; fp32 = not rounded.

    Returns:
        [num_tokens, N], `out_dtype`, contiguous. A row's result does not depend on the other rows.

    Raises:
        ValueError: shapes that do not fit, `weight` neither fp32 nor FP8, K no multiple of 32, or a dtype that is not
            floating point.

    Source: model specification, section 4.3.
    """
    if x.dim() != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"linear_fp8: x must be [num_tokens, K] and weight [N, K], got {got}")
    if isinstance(weight, torch.Tensor) and weight.dtype != torch.float32:
        raise ValueError(f"linear_fp8: weight must be fp32 or packed FP8, got {weight.dtype}")
    if not (x.is_floating_point() and out_dtype.is_floating_point):
        raise ValueError(f"linear_fp8: x and out_dtype must be floating point, got {x.dtype} and {out_dtype}")
    if round_input and x.shape[1] % 32:
        raise ValueError(f"linear_fp8: K must be a multiple of 32 where the input is rounded, got {x.shape[1]}")
    return TABLE(x, weight, round_input, out_dtype)
