"""Root-mean-square normalisation over the last dimension."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, round_to_fp8: bool = False) -> torch.Tensor:
    """Return ``x * rsqrt(mean(x ** 2) + eps) * weight``, computed in fp32 and rounded once. A row of zeros stays zero.

    Args:
        x: [..., hidden_size], bf16 or fp32.
        weight: [hidden_size], bf16 or fp32.
        eps: `rms_norm_eps` of the checkpoint's config (V4.1: 1e-20), > 0.
        round_to_fp8: round the result by `round_fp8` besides, for an FP8 product; hidden_size is a multiple of 32.

    Returns:
        The shape and dtype of `x`. A row's result does not depend on the other rows.

    Raises:
        ValueError: `weight` is not a vector of the width of `x`, `eps` not positive, or a width that cannot be rounded.

    Source: model specification, conventions.
    """
    if not x.dim() or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight must be [hidden_size] of x, got {tuple(weight.shape)} for x {tuple(x.shape)}"
        )
    if eps <= 0:
        raise ValueError(f"rms_norm: eps must be positive, got {eps}")
    if round_to_fp8 and x.shape[-1] % 32:
        raise ValueError(f"rms_norm: hidden_size must be a multiple of 32 to be rounded to FP8, got {x.shape[-1]}")
    return TABLE(x, weight, eps, round_to_fp8)
