"""`accept_drafts` in Triton: a program a request."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_launch import chained, follow


def accept_drafts(
    chosen: torch.Tensor, drafts: torch.Tensor, first_rows: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    requests, device = len(first_rows) - 1, chosen.device
    tokens = torch.empty(requests, width, dtype=torch.int64, device=device)
    emitted = torch.empty(requests, dtype=torch.int32, device=device)
    if requests:
        _accept_drafts[(requests,)](
            *(chosen, drafts, first_rows, tokens, emitted, width),
            WIDTH=triton.next_power_of_2(width),
            num_warps=1,
            **chained(),
        )
    return tokens, emitted


@triton.jit
def _accept_drafts(chosen, drafts, first_rows, tokens, emitted, width, WIDTH: tl.constexpr):
    follow()
    request, place = tl.program_id(0), tl.arange(0, WIDTH)
    first, end = tl.load(first_rows + request), tl.load(first_rows + request + 1)
    own = tl.load(chosen + first + place, first + place < end, -1)
    draft = tl.load(drafts + first + place + 1, first + place + 1 < end, -1)
    count = 1 + tl.min(tl.where((draft == own) & (draft >= 0), WIDTH, place), 0)
    tl.store(tokens + request * width + place, tl.where(place < count, own, -1), place < width)
    tl.store(emitted + request, count)
