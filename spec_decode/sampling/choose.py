"""One token for each row of logits, decided by the request's seed and the token's position: coupled sampling.

Target and drafter choose with the same noise and the same parameters, so a draft that equals the target's choice is
accepted, and the text is the target's own whatever was drafted. Source: runtime specification, sections 3.3 and 3.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepinfer_plugin.kernels.noise import TARGET
from deepinfer_plugin.kernels.sample_tokens import sample_tokens
from deepinfer_plugin.spec_decode.sampling.request import RequestSampling


@dataclass(frozen=True)
class Rows:
    """The requests of some rows of logits, and where the tokens that are chosen from them will stand.

    requests: one for each row; positions: int64 [num_rows], the tokens' absolute positions in their requests;
    outputs: for each row the tokens generated before, None for requests that need none.
    """

    requests: Sequence[RequestSampling]
    positions: torch.Tensor
    outputs: Sequence[Sequence[int] | None]


def adjusted(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """fp32 logits with each request's penalties, biases and exclusions; a copy if anything changes."""
    changing = [row for row, request in enumerate(rows.requests) if request.adjusts]
    if not changing:
        return logits
    logits = logits.clone()
    for row in changing:
        rows.requests[row].adjust(logits[row], rows.outputs[row] or [])
    return logits


@dataclass(frozen=True)
class Limits:
    """Temperature, seed and limits of some rows, as `sample_tokens` takes them; None where no row has that limit."""

    temperature: torch.Tensor
    seeds: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None

    @classmethod
    def of(cls, requests: Sequence[RequestSampling], device: torch.device) -> "Limits":
        params = [request.params for request in requests]

        def limit(values: list[float], off: float, dtype: torch.dtype) -> torch.Tensor | None:
            return torch.tensor(values, dtype=dtype, device=device) if any(v != off for v in values) else None

        return cls(
            torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            torch.tensor([request.seed for request in requests], dtype=torch.int64, device=device),
            limit([max(p.top_k, 0) for p in params], 0, torch.int32),
            limit([p.top_p for p in params], 1, torch.float32),
            limit([p.min_p for p in params], 0, torch.float32),
        )


def choose(logits: torch.Tensor, rows: Rows, stream: int = TARGET) -> torch.Tensor:
    """int64 [num_rows], from adjusted logits, fp32 [num_rows, vocab_size]. A row does not depend on the other rows."""
    return choose_tokens(logits, Limits.of(rows.requests, logits.device), rows.positions, stream)


def choose_tokens(logits: torch.Tensor, limits: Limits, positions: torch.Tensor, stream: int = TARGET) -> torch.Tensor:
    """int64 [num_rows]. positions: int64 [num_rows], where the tokens will stand."""
    return sample_tokens(
        logits, limits.temperature, limits.seeds, positions, limits.top_k, limits.top_p, limits.min_p, stream
    )
