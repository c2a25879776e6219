"""Reading cache rows inside Triton kernels, whatever their record. `records.py` holds the definitions."""

import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_formats import e4m3_value, fp4_tiles, fp8_tile


@triton.jit
def load_rows(cache, rows, present, WIDTH: tl.constexpr, PADDED: tl.constexpr, RECORD: tl.constexpr):
    """[n, PADDED]: the rows at element offsets `rows`, bf16 for records, else the cache's dtype; 0 where not present.

    WIDTH: channels of a row; PADDED: the next power of two, filled with 0.
    """
    start = cache + rows[:, None]
    if RECORD == "plain":
        channel = tl.arange(0, PADDED)
        return tl.load(start + channel[None, :], present[:, None] & (channel < WIDTH)[None, :], 0.0)
    if RECORD == "fp8":
        group = tl.arange(0, PADDED // 32)
        channel = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        stored = present[:, None] & (group * 32 < WIDTH)[None, :]
        codes = tl.load(start[:, :, None] + channel[None, :, :], stored[:, :, None], 0)
        sf = tl.load(start + WIDTH + group[None, :], stored, 0)
        return tl.reshape(fp8_tile(codes, sf[:, :, None]), [rows.shape[0], PADDED])
    SIZE: tl.constexpr = 16 if RECORD == "fp4_kv" else 32
    group = tl.arange(0, PADDED // SIZE)
    byte = group[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    stored = present[:, None] & (group * SIZE < WIDTH)[None, :]
    codes = tl.load(start[:, :, None] + byte[None, :, :], stored[:, :, None], 0)
    sf = tl.load(start + WIDTH // 2 + group[None, :], stored, 0)
    if RECORD == "fp4_kv":
        even, odd = fp4_tiles(codes, tl.full([1, 1, 1], 127, tl.uint8))
        factor = e4m3_value(sf)[:, :, None]  # a product has six significant bits: exact in bf16
        even, odd = (even.to(tl.float32) * factor).to(tl.bfloat16), (odd.to(tl.float32) * factor).to(tl.bfloat16)
    else:
        even, odd = fp4_tiles(codes, sf[:, :, None])
    return tl.reshape(tl.join(even, odd), [rows.shape[0], PADDED])
