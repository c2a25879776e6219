"""`cache_slots` in Triton: one launch instead of seven."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.triton_launch import chained, follow

BLOCK = 128  # rows of a program


def cache_slots(pages: Pages, states: torch.Tensor) -> torch.Tensor:
    num_tokens, table = states.shape[0], pages.block_table
    out = torch.empty_like(states)
    if num_tokens:
        _cache_slots[(triton.cdiv(num_tokens, BLOCK),)](
            *(table, pages.request_ids.contiguous(), states.contiguous(), out, *table.stride(), num_tokens),
            *(pages.cache.shape[1], BLOCK),
            **chained(),
        )
    return out


@triton.jit
def _cache_slots(
    table, requests, states, out, table_row, table_column, num_tokens, states_per_block, BLOCK: tl.constexpr
):
    follow()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(states + row, row < num_tokens, -1)
    there = state >= 0
    place = tl.load(requests + row, there, 0) * table_row + state // states_per_block * table_column
    slot = tl.load(table + place, there, 0).to(tl.int64) * states_per_block + state % states_per_block
    tl.store(out + row, tl.where(there, slot, -1), row < num_tokens)
