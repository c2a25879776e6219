"""Sampling: one token a row, decided by counter-based noise."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch
from deepinfer_plugin.kernels.noise import TARGET

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    stream: int = TARGET,
) -> torch.Tensor:
    """``argmax_v(logit_v / temperature - log E(seed, stream, position, v))`` over the tokens that the limits leave.

    This is a draw from the softmax. Limits act on ``logit / temperature``: the `top_k` highest, of those the fewest
    most likely that reach `top_p`, of those the ones at least `min_p` times as likely as the likeliest. Of equal logits
    the smaller id counts as higher, everywhere. A row with temperature 0 takes its highest logit.

    Args:
        logits: [num_rows, vocab_size], fp32; -inf for tokens that are not allowed. At least one of a row is finite.
        temperature: [num_rows], fp32, >= 0.
        seeds: [num_rows], int64: the 64 bits of each request's seed.
        positions: [num_rows], int64: where in its request the token will stand, below 2**32.
        top_k: [num_rows], int32; values below 1 or above vocab_size leave all.
        top_p: [num_rows], fp32 in (0, 1].
        min_p: [num_rows], fp32 in [0, 1].
        stream: which noise (`kernels/noise.py`).

    Returns:
        [num_rows], int64. A row does not depend on the other rows.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: runtime specification, sections 3.3 to 3.5.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"sample_tokens: logits must be a matrix in fp32, got {logits.dtype} {tuple(logits.shape)}")
    rows = logits.shape[:1]
    for name, value, dtype in (
        ("temperature", temperature, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
    ):
        if value is not None and (value.shape != rows or value.dtype != dtype):
            got = f"{value.dtype} {tuple(value.shape)}"
            raise ValueError(f"sample_tokens: {name} must be {dtype} {list(rows)}, got {got}")
    return TABLE(logits, temperature, seeds, positions, top_k, top_p, min_p, stream)
