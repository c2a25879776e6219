"""The plain matrix product: unquantised input, fp32 accumulation."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def linear(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Return ``x @ weight.T``: products of the values as they are, summed in fp32, rounded once to `out_dtype`.

    Args:
        x: [num_tokens, K], bf16 or fp32.
        weight: [N, K], bf16 or fp32; fp32 saves the conversion.
        out_dtype: of the result; fp32 = not rounded.

    Returns:
        [num_tokens, N], `out_dtype`, contiguous. A row's result does not depend on the other rows.

    Raises:
        ValueError: shapes that do not fit, or a dtype that is not floating point.

    Source: model specification, conventions (rounding points) and section 2.10.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"linear: x must be [num_tokens, K] and weight [N, K], got {got}")
    if not (x.is_floating_point() and weight.is_floating_point() and out_dtype.is_floating_point):
        got = f"{x.dtype}, {weight.dtype} and {out_dtype}"
        raise ValueError(f"linear: x, weight and out_dtype must be floating point, got {got}")
    return TABLE(x, weight, out_dtype)
