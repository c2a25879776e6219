"""Coupled verification: a draft counts if it is the target's own choice at its place."""

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


def as_matrix(emitted: list[list[int]], width: int) -> torch.Tensor:
    """int32 [num_requests, width], `REJECTED` where a request emitted fewer tokens."""
    return torch.tensor([tokens + [REJECTED] * (width - len(tokens)) for tokens in emitted], dtype=torch.int32)
