"""`store_kv_cache` in Triton: a program a row."""

import torch
import triton
import triton.language as tl


def store_kv_cache(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    num_tokens, width = rows.shape
    if num_tokens:
        _store[(num_tokens,)](
            *(rows, cache, slots, *rows.stride(), *cache.stride(), slots.stride(0), cache.shape[1], width),
            BLOCK=triton.next_power_of_2(width),
        )


@triton.jit
def _store(
    rows,
    cache,
    slots,
    row_stride,
    row_channel,
    cache_block,
    cache_state,
    cache_channel,
    slot_stride,
    states_per_block,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row * slot_stride)
    channel = tl.arange(0, BLOCK)
    stored = (channel < width) & (slot >= 0)
    values = tl.load(rows + row * row_stride + channel * row_channel, stored, 0.0)
    place = cache + slot // states_per_block * cache_block + slot % states_per_block * cache_state
    tl.store(place + channel * cache_channel, values.to(cache.dtype.element_ty), stored)
