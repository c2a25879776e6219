"""`verify_budget` in Triton: a program a request counts the drafts that come before each of its own."""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # drafts compared at once


def verify_budget(survival: torch.Tensor, budget: int) -> torch.Tensor:
    num_requests, num_places = survival.shape
    admitted = torch.zeros(num_requests, dtype=torch.int32, device=survival.device)
    if num_requests and num_places:
        _verify_budget[(num_requests,)](
            *(survival, admitted, *survival.stride(), num_requests, num_places, budget),
            PLACES=triton.next_power_of_2(num_places),
            BLOCK=BLOCK,
        )
    return admitted


@triton.jit
def _verify_budget(
    survival,
    admitted,
    stride_request,
    stride_place,
    num_requests,
    num_places,
    budget,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    place = tl.arange(0, PLACES)
    own = tl.load(survival + request * stride_request + place * stride_place, place < num_places, -float("inf"))
    rank = place * num_requests + request  # among equals
    before = tl.zeros((PLACES,), tl.int32)
    for first in range(0, num_requests * num_places, BLOCK):
        flat = first + tl.arange(0, BLOCK)
        inside = flat < num_requests * num_places
        other_request, other_place = flat % num_requests, flat // num_requests
        pointers = survival + other_request * stride_request + other_place * stride_place
        other = tl.load(pointers, inside, -float("inf"))
        earlier = (other[None, :] > own[:, None]) | ((other[None, :] == own[:, None]) & (flat[None, :] < rank[:, None]))
        before += tl.sum((earlier & inside[None, :]).to(tl.int32), 1)
    counts = (before < budget) & (own > -float("inf"))
    tl.store(admitted + request, tl.sum(counts.to(tl.int32), 0))
