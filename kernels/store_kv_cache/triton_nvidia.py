"""`store_kv_cache` in Triton: a program a row."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.kernels.triton_formats import (
    e2m1_code,
    e4m3_byte,
    fp4_group_sf,
    fp4_kv_group_sf,
    fp8_group_sf,
    power_of_two_byte,
    reciprocal_of_power,
    round_e2m1,
    round_e4m3,
)


def store_kv_cache(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, record: Record) -> None:
    num_tokens, width = rows.shape
    if not num_tokens:
        return
    places = (cache, slots, *rows.stride(), *cache.stride(), slots.stride(0), cache.shape[1], width)
    if record is Record.PLAIN:
        _store_plain[(num_tokens,)](rows, *places, BLOCK=triton.next_power_of_2(width))
    else:
        _store_record[(num_tokens,)](
            *(rows, *places),
            RECORD=record.value,
            GROUPS=triton.next_power_of_2(width // record.group_size),
            GROUP_SIZE=record.group_size,
            num_warps=1,
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
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row * slot_stride)
    place = cache + slot // states_per_block * cache_block + slot % states_per_block * cache_state
    group = tl.arange(0, GROUPS)
    group_stored = (group < width // GROUP_SIZE) & (slot >= 0)
    source = rows + row * row_stride
    if RECORD == "fp8":
        channel = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        values = tl.load(source + channel * row_channel, group_stored[:, None], 0.0).to(tl.float32)
        sf = fp8_group_sf(tl.max(tl.abs(values), 1))
        codes = e4m3_byte(round_e4m3(values * reciprocal_of_power(sf)[:, None]))
        tl.store(place + channel * cache_channel, codes, group_stored[:, None])
        tl.store(place + (width + group) * cache_channel, power_of_two_byte(sf), group_stored)
    else:
        byte = group[:, None] * (GROUP_SIZE // 2) + tl.arange(0, GROUP_SIZE // 2)[None, :]
        even = tl.load(source + 2 * byte * row_channel, group_stored[:, None], 0.0).to(tl.float32)
        odd = tl.load(source + (2 * byte + 1) * row_channel, group_stored[:, None], 0.0).to(tl.float32)
        amax = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
        if RECORD == "fp4_kv":
            sf = fp4_kv_group_sf(amax)
            sf_byte = e4m3_byte(sf)
            factor = tl.div_rn(1.0, sf)[:, None]
        else:
            sf = fp4_group_sf(amax)
            sf_byte = power_of_two_byte(sf)
            factor = reciprocal_of_power(sf)[:, None]
        codes = e2m1_code(round_e2m1(even * factor)) | (e2m1_code(round_e2m1(odd * factor)) << 4)
        tl.store(place + byte * cache_channel, codes.to(tl.uint8), group_stored[:, None])
        tl.store(place + (width // 2 + group) * cache_channel, sf_byte, group_stored)
