"""`norm_rope_store` in Triton: a program a row, its even and its odd channels apart, as `rope` turns them."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.kernels.triton_launch import chained, follow
from deepinfer_plugin.kernels.triton_records import round_row, store_record


def norm_rope_store(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    record: Record,
    rounded_as: Record,
) -> None:
    num_tokens, width = x.shape
    if not num_tokens:
        return
    form = record if rounded_as is Record.PLAIN else rounded_as
    group = max(form.group_size, 16)
    _norm_rope_store[(num_tokens,)](
        *(x, norm_weight, cos_sin, cache, slots, *x.stride(), cos_sin.stride(0), *cache.stride(), slots.stride(0)),
        *(cache.shape[1], width, cos_sin.shape[1], eps),
        HAS_NORM=norm_weight is not None,
        RECORD=record.value,
        ROUNDED_AS=rounded_as.value,
        GROUPS=triton.next_power_of_2(triton.cdiv(width, group)),
        PAIRS=group // 2,
        num_warps=1 if width <= 512 else 4,
        **chained(),
    )


@triton.jit
def _norm_rope_store(
    x,
    norm_weight,
    cos_sin,
    cache,
    slots,
    x_row,
    x_channel,
    cos_row,
    cache_block,
    cache_state,
    cache_channel,
    slot_stride,
    states_per_block,
    width,
    rope_width,
    eps,
    HAS_NORM: tl.constexpr,
    RECORD: tl.constexpr,
    ROUNDED_AS: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    follow()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row * slot_stride)
    if slot < 0:
        return
    group = tl.arange(0, GROUPS)
    pair = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    inside = 2 * pair < width
    source = x + row * x_row + 2 * pair * x_channel
    even, odd = tl.load(source, inside, 0.0), tl.load(source + x_channel, inside, 0.0)
    dtype = even.dtype
    if HAS_NORM:
        even, odd = even.to(tl.float32), odd.to(tl.float32)
        factor = tl.rsqrt(tl.sum(even * even + odd * odd) / width + eps)
        even = even * factor * tl.load(norm_weight + 2 * pair, inside, 0.0).to(tl.float32)
        odd = odd * factor * tl.load(norm_weight + 2 * pair + 1, inside, 0.0).to(tl.float32)
        even, odd = even.to(dtype), odd.to(dtype)
    turned = pair - (width - rope_width) // 2
    turns = inside & (turned >= 0)
    angle = cos_sin + row * cos_row + turned
    cos, sin = tl.load(angle, turns, 1.0), tl.load(angle + rope_width // 2, turns, 0.0)
    a, b = even.to(tl.float32), odd.to(tl.float32)
    a, b = (a * cos - b * sin).to(dtype).to(tl.float32), (b * cos + a * sin).to(dtype).to(tl.float32)
    place = cache + slot // states_per_block * cache_block + slot % states_per_block * cache_state
    if RECORD == "plain":
        if ROUNDED_AS != "plain":
            a, b = round_row(a, b, ROUNDED_AS)
            a, b = a.to(dtype), b.to(dtype)
        place += 2 * pair * cache_channel
        tl.store(place, a.to(cache.dtype.element_ty), inside)
        tl.store(place + cache_channel, b.to(cache.dtype.element_ty), inside)
    else:
        store_record(a, b, place, cache_channel, width, RECORD)
