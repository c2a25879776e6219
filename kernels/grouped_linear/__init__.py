"""One matrix product per group of channels: the first half of V4.1's output projection."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

TABLE = Dispatch(__name__, cpu="reference", nvidia="reference")


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Return ``y[t, g] = x[t, g] @ weight[g].T``, summed in fp32, rounded once to `out_dtype`.

    Args:
        x: [num_tokens, num_groups, K], bf16 or fp32.
        weight: [num_groups, N, K], bf16 or fp32; fp32 saves the conversion.
        out_dtype: of the result; fp32 = not rounded.

    Returns:
        [num_tokens, num_groups, N], `out_dtype`. A row's result does not depend on the other rows.

    Raises:
        ValueError: shapes that do not fit.

    Source: model specification, section 2.7 (``U_g``).
    """
    if x.dim() != 3 or weight.dim() != 3 or (x.shape[1], x.shape[2]) != (weight.shape[0], weight.shape[2]):
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"grouped_linear: x must be [num_tokens, G, K] and weight [G, N, K], got {got}")
    return TABLE(x, weight, out_dtype)
