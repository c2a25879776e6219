"""The compressor of a KV source layer: one latent per token (ratio 1) or per pair of tokens (ratio 2)."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def compress_kv(
    value: torch.Tensor,
    score: torch.Tensor | None,
    previous: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``rmsnorm(round(a * previous_value + b * value))`` with a softmax (a, b) over the two scores of each channel.

    Ratio 1 has neither scores nor previous rows: ``rmsnorm(round(value))``. The value is rounded to `out_dtype` before
    the norm, the norm rounds once more. The latent is not rotated. A row is one group; the caller passes the row that
    closes it, and may pass rows that close none (their result means nothing, and is no other row's business).

    Args:
        value: [num_tokens, head_dim], fp32; the projection of the group's last token.
        score: [num_tokens, head_dim], fp32; the gate of the same token. None for ratio 1.
        previous: [num_tokens, 2 * head_dim], fp32; value, then score, of the token before. None for ratio 1.
        norm_weight: [head_dim].
        eps: of the norm (V4.1: 1e-20).
        out_dtype: of the latent.

    Returns:
        [num_tokens, head_dim], `out_dtype`.

    Raises:
        ValueError: shapes that do not fit, `value` not fp32, or only one of `score` and `previous`.

    Source: model specification, section 2.5.
    """
    if value.dim() != 2 or value.dtype != torch.float32 or norm_weight.shape != value.shape[1:]:
        got = f"{tuple(value.shape)} {value.dtype} and norm_weight {tuple(norm_weight.shape)}"
        raise ValueError(f"compress_kv: value must be fp32 [num_tokens, head_dim], norm_weight [head_dim], got {got}")
    if (score is None) != (previous is None):
        raise ValueError(
            f"compress_kv: score and previous go together, got only {'previous' if previous is not None else 'score'}"
        )
    if score is not None and previous is not None:
        num_tokens, head_dim = value.shape
        if score.shape != value.shape or previous.shape != (num_tokens, 2 * head_dim):
            got = f"{tuple(value.shape)}, {tuple(score.shape)} and {tuple(previous.shape)}"
            raise ValueError(f"compress_kv: value and score must be [n, d], previous [n, 2 * d], got {got}")
    return TABLE(value, score, previous, norm_weight, eps, out_dtype)
