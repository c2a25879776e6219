"""Root-mean-square normalisation over the last dimension."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x * rsqrt(mean(x ** 2) + eps) * weight``, computed in fp32 and rounded once. A row of zeros stays zero.

    Args:
        x: [..., hidden_size], bf16 or fp32.
        weight: [hidden_size], bf16 or fp32.
        eps: `rms_norm_eps` of the checkpoint's config (V4.1: 1e-20), > 0.

    Returns:
        The shape and dtype of `x`. A row's result does not depend on the other rows.

    Raises:
        ValueError: `weight` is not a vector of the width of `x`, or `eps` not positive.

    Source: model specification, conventions.
    """
    if not x.dim() or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight must be [hidden_size] of x, got {tuple(weight.shape)} for x {tuple(x.shape)}"
        )
    if eps <= 0:
        raise ValueError(f"rms_norm: eps must be positive, got {eps}")
    return TABLE(x, weight, eps)
