"""Reading cache rows inside Triton kernels, whatever their record. `records.py` holds the definitions.

A row comes as two tensors, its even and its odd channels: that is how two codes share a byte, and taking them apart
costs nothing where the order of channels does not matter.
"""

import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_formats import e4m3_value, fp4_tiles, fp8_pair_tiles


@triton.jit
def load_rows(cache, rows, present, WIDTH: tl.constexpr, HALF: tl.constexpr, RECORD: tl.constexpr):
    """(even, odd) channels of the rows at element offsets `rows`, [n, HALF] each; 0 where not present.

    bf16 for records, else the cache's dtype. HALF: WIDTH / 2 or the next power of two, filled with 0.
    """
    start = cache + rows[:, None]
    if RECORD == "plain":
        pair = tl.arange(0, HALF)
        stored = present[:, None] & (2 * pair < WIDTH)[None, :]
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
    stored = present[:, None] & (group * (2 * PAIRS) < WIDTH)[None, :]
    sf = tl.load(start + (WIDTH if RECORD == "fp8" else WIDTH // 2) + group[None, :], stored, 0)
    if RECORD == "fp8":
        place = start[:, :, None] + 2 * pair[None, :, :]
        if (WIDTH + WIDTH // 32) % 2:  # every other record starts at an odd address
            low, high = tl.load(place, stored[:, :, None], 0), tl.load(place + 1, stored[:, :, None], 0)
            codes = low.to(tl.uint16) | (high.to(tl.uint16) << 8)
        else:
            codes = tl.load(place.to(tl.pointer_type(tl.uint16)), stored[:, :, None], 0)
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
