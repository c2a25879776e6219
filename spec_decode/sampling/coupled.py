"""Coupled verification: a draft counts if it is the target's own choice at its place."""

from collections.abc import Sequence
from itertools import takewhile

import torch

REJECTED = -1  # as in vLLM's outputs


def accepted(chosen: list[int], drafts: list[list[int]]) -> list[list[int]]:
    """The tokens that each request emits: accepted drafts, then the target's choice where they end.

    Args:
        chosen: the target's choice for each row; a request's rows follow each other, that of its newest token first,
            then those of its drafts.
        drafts: the verified drafts of each request.

    Source: runtime specification, section 3.4.
    """
    emitted, first = [], 0
    for request in drafts:
        own = chosen[first : first + len(request) + 1]
        length = next((j for j, draft in enumerate(request) if draft != own[j]), len(request))
        emitted.append(own[: length + 1])
        first += len(request) + 1
    return emitted


def without_placeholders(flat: Sequence[int], counts: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Each request's drafts up to the first that is none, and the rows of logits that remain.

    vLLM pads the drafts of a request with negative ids: of one that joins a batch with a single token to compute, and
    those that a grammar forbids. None of them may be accepted, whatever the target chooses.

    Args:
        flat: the drafts of all requests, one request's behind the other's.
        counts: how many belong to each; it has one row of logits more than that.
    """
    drafts: list[list[int]] = []
    rows: list[int] = []
    first = 0
    for n, count in enumerate(counts):
        own = list(takewhile(lambda token: token >= 0, flat[first : first + count]))
        drafts.append(own)
        rows.extend(range(first + n, first + n + len(own) + 1))
        first += count
    return drafts, rows


def as_matrix(emitted: list[list[int]], width: int) -> torch.Tensor:
    """int32 [num_requests, width], `REJECTED` where a request emitted fewer tokens."""
    return torch.tensor([tokens + [REJECTED] * (width - len(tokens)) for tokens in emitted], dtype=torch.int32)
