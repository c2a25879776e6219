"""One matrix product per group of channels: the first half of V4.1's output projection."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch
from deepinfer_plugin.kernels.packed_weights import Fp8Weight

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor | Fp8Weight, round_input: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return ``y[t, g] = round_fp8(x[t, g]) @ weight[g].T``, summed in fp32, rounded once to `out_dtype`.

    Args:
        x: [num_tokens, num_groups, K], bf16 or fp32.
        weight: [num_groups, N, K], bf16 or fp32 (which saves the conversion), or [num_groups * N, K], FP8.
        round_input: False = multiply x as it is.
        out_dtype: of the result; fp32 = not rounded.

    Returns:
        [num_tokens, num_groups, N], `out_dtype`. A row's result does not depend on the other rows.

    Raises:
        ValueError: shapes that do not fit.

    Source: model specification, section 2.7 (``U_g``).
    """
    if isinstance(weight, Fp8Weight):
        fits = x.dim() == 3 and x.shape[2] == weight.shape[1] and weight.shape[0] % x.shape[1] == 0
    else:
        fits = x.dim() == weight.dim() == 3 and (x.shape[1], x.shape[2]) == (weight.shape[0], weight.shape[2])
    if not fits:
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"grouped_linear: x must be [num_tokens, G, K] and weight [G, N, K], got {got}")
    return TABLE(x, weight, round_input, out_dtype)
