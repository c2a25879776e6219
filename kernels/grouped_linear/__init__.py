"""One matrix product per group of channels: the first half of V4.1's output projection."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch
from deepinfer_plugin.kernels.packed_weights import Fp8Weight

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor | Fp8Weight, out_dtype: torch.dtype, round_output: bool = False
) -> torch.Tensor:
    """Return ``y[t, g] = x[t, g] @ weight[g].T``, summed in fp32, rounded once to `out_dtype`.

    Args:
        x: [num_tokens, num_groups, K], bf16 or fp32; exact in bf16 beside a packed weight.
        weight: [num_groups, N, K], bf16 or fp32 (which saves the conversion), or [num_groups * N, K], FP8.
        out_dtype: of the result; fp32 = not rounded.
        round_output: round the result to FP8 besides, for the next product; N is a multiple of 32.

    Returns:
        [num_tokens, num_groups, N], `out_dtype`. A row's result does not depend on the other rows.

    Raises:
        ValueError: shapes that do not fit, or N no multiple of 32 where the result is rounded.

    Source: model specification, section 2.7 (``U_g``).
    """
    if isinstance(weight, Fp8Weight):
        fits = x.dim() == 3 and x.shape[2] == weight.shape[1] and weight.shape[0] % x.shape[1] == 0
    else:
        fits = x.dim() == weight.dim() == 3 and (x.shape[1], x.shape[2]) == (weight.shape[0], weight.shape[2])
    if not fits:
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"grouped_linear: x must be [num_tokens, G, K] and weight [G, N, K], got {got}")
    num_columns = weight.shape[0] // x.shape[1] if isinstance(weight, Fp8Weight) else weight.shape[1]
    if round_output and num_columns % 32:
        raise ValueError(f"grouped_linear: N must be a multiple of 32 where the result is rounded, got {num_columns}")
    return TABLE(x, weight, out_dtype, round_output)
