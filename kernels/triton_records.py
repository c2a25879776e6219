"""Reading and writing cache rows inside Triton kernels, whatever their record. `records.py` holds the definitions.

A row comes as two tensors, its even and its odd channels: that is how two codes share a byte, and taking them apart
costs nothing where the order of channels does not matter.
"""

import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_formats import (
    e2m1_code,
    e4m3_byte,
    e4m3_value,
    fp4_group_sf,
    fp4_kv_group_sf,
    fp4_tiles,
    fp8_group_sf,
    fp8_pair_tiles,
    power_of_two_byte,
    reciprocal_of_power,
    round_e2m1,
    round_e4m3,
)


@triton.jit
def load_rows(cache, rows, present, WIDTH: tl.constexpr, HALF: tl.constexpr, RECORD: tl.constexpr):
    """(even, odd) channels of the rows at element offsets `rows`, [n, HALF] each; 0 where not present.

    bf16 for records, else the cache's dtype. HALF: WIDTH / 2 or the next power of two, filled with 0.
    """
    start = cache + rows[:, None]
    if RECORD == "plain":
        pair = tl.arange(0, HALF)
        stored = present[:, None] & (pair < WIDTH // 2)[None, :]
        even = tl.load(start + 2 * pair[None, :], stored, 0.0)
        odd = tl.load(start + 2 * pair[None, :] + 1, stored, 0.0)
    else:
        even, odd = _load_records(start, present, WIDTH, HALF, RECORD)
    return even, odd


@triton.jit
def _load_records(start, present, WIDTH: tl.constexpr, HALF: tl.constexpr, RECORD: tl.constexpr):
    PAIRS: tl.constexpr = 8 if RECORD == "fp4_kv" else 16  # of channels with one scale
    group = tl.arange(0, HALF // PAIRS)
    pair = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    stored = present[:, None] & (group < WIDTH // (2 * PAIRS))[None, :]
    sf = tl.load(start + (WIDTH if RECORD == "fp8" else WIDTH // 2) + group[None, :], stored, 0)
    if RECORD == "fp8":
        if (WIDTH + WIDTH // 32) % 2:  # every other record starts at an odd address
            place = start[:, :, None] + 2 * pair[None, :, :]
            low, high = tl.load(place, stored[:, :, None], 0), tl.load(place + 1, stored[:, :, None], 0)
            codes = low.to(tl.uint16) | (high.to(tl.uint16) << 8)
        else:
            codes = tl.load(start.to(tl.pointer_type(tl.uint16))[:, :, None] + pair[None, :, :], stored[:, :, None], 0)
        even, odd = fp8_pair_tiles(codes, sf[:, :, None])
    else:
        codes = tl.load(start[:, :, None] + pair[None, :, :], stored[:, :, None], 0)
        if RECORD == "fp4_kv":
            even, odd = fp4_tiles(codes, tl.full([1, 1, 1], 127, tl.uint8))
            factor = e4m3_value(sf)[:, :, None].to(tl.bfloat16)  # a product has six significant bits: exact
            even, odd = even * factor, odd * factor
        else:
            even, odd = fp4_tiles(codes, sf[:, :, None])
    return tl.reshape(even, [start.shape[0], HALF]), tl.reshape(odd, [start.shape[0], HALF])


@triton.jit
def round_row(even, odd, RECORD: tl.constexpr):
    """What the record of a row holds. even, odd: its fp32 channels, [groups, pairs] with one scale a group."""
    sf, factor = _scale(even, odd, RECORD)
    if RECORD == "fp8":
        even, odd = round_e4m3(even * factor), round_e4m3(odd * factor)
    else:
        even, odd = round_e2m1(even * factor), round_e2m1(odd * factor)
    return even * sf[:, None], odd * sf[:, None]


@triton.jit
def store_record(even, odd, place, stride, width, RECORD: tl.constexpr):
    """Encode a row, given as for `round_row`, and store it. place: of the record; stride: between its bytes."""
    GROUPS: tl.constexpr = even.shape[0]
    PAIRS: tl.constexpr = even.shape[1]
    group = tl.arange(0, GROUPS)
    pair = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    stored = group * (2 * PAIRS) < width
    sf, factor = _scale(even, odd, RECORD)
    if RECORD == "fp8":
        codes = place + 2 * pair * stride
        tl.store(codes, e4m3_byte(round_e4m3(even * factor)), stored[:, None])
        tl.store(codes + stride, e4m3_byte(round_e4m3(odd * factor)), stored[:, None])
    else:
        codes = e2m1_code(round_e2m1(even * factor)) | (e2m1_code(round_e2m1(odd * factor)) << 4)
        tl.store(place + pair * stride, codes.to(tl.uint8), stored[:, None])
    sf_byte = e4m3_byte(sf) if RECORD == "fp4_kv" else power_of_two_byte(sf)
    behind = width if RECORD == "fp8" else width // 2
    tl.store(place + (behind + group) * stride, sf_byte, stored)


@triton.jit
def _scale(even, odd, RECORD: tl.constexpr):
    """(the scale of every group, what its channels are multiplied by to become codes)."""
    amax = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
    if RECORD == "fp8":
        sf = fp8_group_sf(amax)
        factor = reciprocal_of_power(sf)[:, None]
    elif RECORD == "fp4_kv":
        sf = fp4_kv_group_sf(amax)
        factor = tl.div_rn(1.0, sf)[:, None]
    else:
        sf = fp4_group_sf(amax)
        factor = reciprocal_of_power(sf)[:, None]
    return sf, factor
