"""The definition of `accept_drafts`: what every other module of this folder must equal."""

import torch


def accept_drafts(
    chosen: torch.Tensor, drafts: torch.Tensor, first_rows: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if not len(chosen):
        requests = len(first_rows) - 1
        return chosen.new_full((requests, width), -1), first_rows.new_zeros(requests)
    place = torch.arange(width, device=chosen.device)
    rows = first_rows[:-1, None] + place
    is_own = rows < first_rows[1:, None]
    rows = rows.clamp(max=len(chosen) - 1).long()
    own = chosen[rows]
    foreseen = torch.roll(drafts, -1)[rows] == own  # the next row's input against this row's choice
    foreseen &= (rows + 1 < first_rows[1:, None]) & (own >= 0)
    emitted = 1 + foreseen.int().cumprod(1).sum(1, dtype=torch.int32)
    return own.masked_fill(~is_own | (place >= emitted[:, None]), -1), emitted
