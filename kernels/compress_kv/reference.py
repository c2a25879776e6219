"""The definition of `compress_kv`: what every other module of this folder must equal."""

import torch

from deepinfer_plugin.kernels.rms_norm.reference import rms_norm


def compress_kv(
    value: torch.Tensor,
    score: torch.Tensor | None,
    previous: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if score is not None and previous is not None:
        previous_value, previous_score = previous.chunk(2, dim=1)
        # softmax over the last axis: over another one, torch gives a row's tail channels other last bits
        weights = torch.stack((previous_score, score), dim=-1).softmax(-1)  # [num_tokens, head_dim, 2]
        value = weights[..., 0] * previous_value + weights[..., 1] * value
    return rms_norm(value.to(out_dtype), norm_weight, eps, False)
