"""`store_kv_cache` in Triton: a program a row."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.kernels.triton_launch import chained, follow
from deepinfer_plugin.kernels.triton_records import store_record


def store_kv_cache(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, record: Record) -> None:
    num_tokens, width = rows.shape
    if not num_tokens:
        return
    places = (cache, slots, *rows.stride(), *cache.stride(), slots.stride(0), cache.shape[1], width)
    if record is Record.PLAIN:
        _store_plain[(num_tokens,)](rows, *places, BLOCK=triton.next_power_of_2(width), **chained())
    else:
        _store_record[(num_tokens,)](
            *(rows, *places),
            RECORD=record.value,
            GROUPS=triton.next_power_of_2(width // record.group_size),
            GROUP_SIZE=record.group_size,
            num_warps=1,
            **chained(),
        )


@triton.jit
def _store_plain(
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
    follow()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row * slot_stride)
    channel = tl.arange(0, BLOCK)
    stored = (channel < width) & (slot >= 0)
    values = tl.load(rows + row * row_stride + channel * row_channel, stored, 0.0)
    place = cache + slot // states_per_block * cache_block + slot % states_per_block * cache_state
    tl.store(place + channel * cache_channel, values.to(cache.dtype.element_ty), stored)


@triton.jit
def _store_record(
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
    RECORD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    follow()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row * slot_stride)
    place = cache + slot // states_per_block * cache_block + slot % states_per_block * cache_state
    if slot < 0:
        return
    pair = tl.arange(0, GROUPS)[:, None] * (GROUP_SIZE // 2) + tl.arange(0, GROUP_SIZE // 2)[None, :]
    source = rows + row * row_stride + 2 * pair * row_channel
    even = tl.load(source, 2 * pair < width, 0.0).to(tl.float32)
    odd = tl.load(source + row_channel, 2 * pair < width, 0.0).to(tl.float32)
    store_record(even, odd, place, cache_channel, width, RECORD)
