"""How much of an n-gram memory entry each residual stream takes in."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def engram_gate(
    streams: torch.Tensor,
    key_values: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``streams[i] + gate[i] * value``, the gate from the normalised dot product of stream and key i.

    ``d = mean-square-normalised(streams[i]) * q_weight[i] . mean-square-normalised(key[i]) * k_weight[i] /
    sqrt(hidden_size)`` and ``gate = sigmoid(copysign(sqrt(max(|d|, 1e-6)), d))``. All fp32, rounded once; d = 0 counts
    as positive.

    Args:
        streams: [num_tokens, m, hidden_size], bf16 or fp32.
        key_values: [num_tokens, m + 1, hidden_size]: a key per stream, then the value that all streams share.
        q_weight: [m, hidden_size], bf16 or fp32.
        k_weight: [m, hidden_size], bf16 or fp32.
        eps: `rms_norm_eps` of the checkpoint's config (V4.1: 1e-20), > 0.
        skip: [num_tokens], bool: rows that keep their streams (image tokens); None = none.

    Returns:
        A new tensor of the shape and dtype of `streams`. A row's result does not depend on the other rows.

    Raises:
        ValueError: shapes that do not fit, `skip` not bool, or `eps` not positive.

    Source: model specification, section 2.8 (f).
    """
    if streams.dim() != 3:
        raise ValueError(f"engram_gate: streams must be [num_tokens, m, hidden_size], got {tuple(streams.shape)}")
    num_tokens, num_streams, hidden_size = streams.shape
    if key_values.shape != (num_tokens, num_streams + 1, hidden_size):
        want = [num_tokens, num_streams + 1, hidden_size]
        raise ValueError(f"engram_gate: key_values must be {want}, got {tuple(key_values.shape)}")
    if q_weight.shape != (num_streams, hidden_size) or k_weight.shape != (num_streams, hidden_size):
        got = f"{tuple(q_weight.shape)} and {tuple(k_weight.shape)}"
        raise ValueError(f"engram_gate: q_weight and k_weight must be {[num_streams, hidden_size]}, got {got}")
    if skip is not None and (skip.shape != (num_tokens,) or skip.dtype != torch.bool):
        raise ValueError(f"engram_gate: skip must be [{num_tokens}] bool, got {tuple(skip.shape)} {skip.dtype}")
    if eps <= 0:
        raise ValueError(f"engram_gate: eps must be positive, got {eps}")
    return TABLE(streams, key_values, q_weight, k_weight, eps, skip)
