"""Rotary position embedding of the last channels of every head, adjacent pairs."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def rope(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False, round_to_fp8: bool = False) -> torch.Tensor:
    """Rotate the pairs ``(x[2i], x[2i+1])`` of the last R channels by the row's angles; the others pass through.

    ``(a, b) -> (a cos - b sin, b cos + a sin)``, in fp32, rounded once; `inverse` rotates by the negative angles.

    Args:
        x: [num_tokens, num_heads, head_dim], bf16 or fp32; not written to.
        cos_sin: [num_tokens, R], fp32, each token's row of `rope_table`: R/2 cosines, then R/2 sines. R is
            even and at most head_dim.
        inverse: undo a rotation.
        round_to_fp8: round the result by `round_fp8` besides, for an FP8 product; head_dim is a multiple of 32.

    Returns:
        A new contiguous tensor of the shape and dtype of `x`. A row's result does not depend on the other rows.

    Raises:
        ValueError: wrong ranks, unequal numbers of rows, R odd or wider than a head, `cos_sin` not fp32, or heads that
            cannot be rounded.

    Source: model specification, section 2.3.
    """
    if x.dim() != 3 or cos_sin.dim() != 2 or x.shape[0] != cos_sin.shape[0]:
        got = f"{tuple(x.shape)} and {tuple(cos_sin.shape)}"
        raise ValueError(f"rope: x must be [num_tokens, num_heads, head_dim] and cos_sin [num_tokens, R], got {got}")
    if cos_sin.shape[1] % 2 or cos_sin.shape[1] > x.shape[2] or cos_sin.dtype != torch.float32:
        got = f"R = {cos_sin.shape[1]}, {cos_sin.dtype}, head_dim {x.shape[2]}"
        raise ValueError(f"rope: cos_sin must be fp32 with R even and at most head_dim, got {got}")
    if round_to_fp8 and x.shape[2] % 32:
        raise ValueError(f"rope: head_dim must be a multiple of 32 to be rounded to FP8, got {x.shape[2]}")
    return TABLE(x, cos_sin, inverse, round_to_fp8)
