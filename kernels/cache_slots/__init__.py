"""Where the rows of a step write in a paged cache."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch
from deepinfer_plugin.kernels.paged import Pages

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def cache_slots(pages: Pages, states: torch.Tensor) -> torch.Tensor:
    """`Pages.slots` of one state for every row: `block * states_per_block + offset`.

    Args:
        pages: whose cache is not read.
        states: [num_tokens], int64; negative for none.

    Returns:
        [num_tokens], int64; -1 where the state is negative.

    Raises:
        ValueError: another number of states than of rows.
    """
    if states.shape != pages.request_ids.shape:
        got = f"{tuple(states.shape)} for {tuple(pages.request_ids.shape)}"
        raise ValueError(f"cache_slots: there must be a state for every row of the batch, got {got}")
    return TABLE(pages, states)
