"""`moe_experts` in Triton: two grouped products over packed FP4 experts, and an ordered sum.

Pairs (token, expert) are sorted by expert into tiles; a tile's rows see one expert. What a row computes does not depend
on its tile: weights are the instruction's rows and tokens its columns, and K is summed in one order.
"""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels import target
from deepinfer_plugin.kernels.moe_experts.triton_tiles import pairs_in_tiles
from deepinfer_plugin.kernels.packed_weights import Fp4Weight
from deepinfer_plugin.kernels.swiglu.triton_nvidia import clamped_swiglu
from deepinfer_plugin.kernels.triton_formats import fp8_group_sf, reciprocal_of_power, round_e4m3
from deepinfer_plugin.kernels.triton_matmul import most_tokens, stages
from deepinfer_plugin.kernels.triton_phases import (
    BLOCK,
    FP4_BIAS,
    Phased,
    factor_words,
    in_phases,
    load_scales,
    num_blocks,
    phases,
    place_of,
)

SUM_BLOCK = 1024


def moe_experts(
    x: torch.Tensor,
    w13: Fp4Weight,
    w2: Fp4Weight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_start: int,
    limit: float,
    round_input: bool,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    if not (isinstance(w13, Fp4Weight) and isinstance(w2, Fp4Weight) and round_input):
        raise NotImplementedError("moe_experts: in Triton experts must be packed FP4 and their inputs rounded to FP8")
    (num_tokens, hidden_size), (num_experts, _, width), top_k = x.shape, w2.shape, topk_ids.shape[1]
    out = torch.empty(num_tokens, hidden_size, dtype=torch.float32, device=x.device)
    if num_experts == 0 or topk_ids.numel() == 0:
        return out.zero_() if added is None else out.copy_(added)
    num_pairs = num_tokens * top_k
    most = 32 if target.compute_capability() == 100 else most_tokens()  # SM100: as `packed_tile` says
    tokens = min(most, max(16, triton.next_power_of_2(num_pairs // num_experts + 1)))
    tile_pairs, tile_experts = pairs_in_tiles(topk_ids.flatten(), expert_start, num_experts, tokens)
    inputs = in_phases(x, round_to_fp8=True)
    activation = Phased.empty(num_pairs, depth=width, device=x.device)
    products = x.new_empty(num_pairs, hidden_size, dtype=torch.float32)
    rows, warps, stages = gate_up_tile(tokens)
    _gate_up[(len(tile_experts), triton.cdiv(width, rows))](
        *(inputs.values, *_words(w13), topk_weights, activation.values, tile_pairs, tile_experts, num_pairs, width),
        *(hidden_size, num_blocks(hidden_size), limit, top_k, inputs.values.stride(0), activation.values.stride(0)),
        WHOLE=hidden_size % BLOCK.value == 0,
        TOKENS=tokens,
        ROWS=rows,
        num_warps=warps,
        num_stages=stages,
    )
    rows, warps, stages = down_tile(tokens)
    _down[(len(tile_experts), triton.cdiv(hidden_size, rows))](
        *(activation.values, *_words(w2), products, tile_pairs, tile_experts, num_pairs, hidden_size, width),
        *(num_blocks(width), activation.values.stride(0)),
        WHOLE=width % BLOCK.value == 0,
        TOKENS=tokens,
        ROWS=rows,
        num_warps=warps,
        num_stages=stages,
    )
    _sum_pairs[(num_tokens, triton.cdiv(hidden_size, SUM_BLOCK))](
        *(products, topk_ids, added, out, expert_start, num_experts, hidden_size, top_k, SUM_BLOCK)
    )
    return out


def gate_up_tile(tokens: int) -> tuple[int, int, int]:
    """Gate rows of a program (and as many up rows), its warps and its stages."""
    rows = 32 if tokens == 64 == most_tokens() else 64  # registers
    return rows, 4, stages(rows * BLOCK.value, 2 * rows, tokens, 4)


def down_tile(tokens: int) -> tuple[int, int, int]:
    """Weight rows of a program, its warps and its stages. 64 rows take at most four warps: more would share rows."""
    rows, warps = (64, 4) if tokens <= 64 else (128, 8)
    return rows, warps, stages(rows * BLOCK.value // 2, rows, tokens, 4)


def _words(weight: Fp4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes by eight, and scales by four where K is a multiple of BLOCK."""
    whole = weight.shape[2] % BLOCK.value == 0
    return weight.interleave().codes.view(torch.int32), weight.sf.view(torch.int32) if whole else weight.sf


@triton.jit
def _load_phases(words, sf, row, present, block, depth, WHOLE: tl.constexpr):
    """The eight phases of a block of weight rows. words, sf: of one expert; WHOLE: depth is a multiple of BLOCK."""
    word = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    words += row[:, None] * (depth // 8) + word[None, :]
    if WHOLE:
        tile = tl.load(words, present[:, None], 0)
        scales = tl.load(sf + row * (depth // BLOCK) + block, present, 0)
    else:
        tile = tl.load(words, present[:, None] & (word * 8 < depth)[None, :], 0)
        scales = load_scales(sf + row * (depth // 32), block, depth // 32, present)
    return phases(tile, factor_words(scales, FP4_BIAS), True)


@triton.jit
def _gate_up(
    x,
    words,
    sf,
    topk_weights,
    activation,
    tile_pairs,
    tile_experts,
    num_pairs,
    width,
    depth,
    blocks,
    limit,
    top_k,
    x_row,
    activation_row,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """``round_fp8(swiglu(w13 @ x) * weight)`` of a tile's pairs, in phases."""
    tile = tl.program_id(0)
    if tl.load(tile_pairs + tile * TOKENS) >= num_pairs:
        return
    pair = tl.load(tile_pairs + tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    present = pair < num_pairs
    expert = tl.load(tile_experts + tile).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_present = row < width
    row_sf: tl.constexpr = BLOCK if WHOLE else 32  # channels of an element of `sf`
    gate_words, gate_sf = words + expert * 2 * width * (depth // 8), sf + expert * 2 * width * (depth // row_sf)
    up_words, up_sf = gate_words + width * (depth // 8), gate_sf + width * (depth // row_sf)
    x_rows = x + (pair // top_k)[:, None] * x_row + tl.arange(0, BLOCK // 8)[None, :]
    gate, up = tl.zeros([ROWS, TOKENS], tl.float32), tl.zeros([ROWS, TOKENS], tl.float32)
    for block in range(blocks):
        gates = _load_phases(gate_words, gate_sf, row, row_present, block, depth, WHOLE)
        for phase in tl.static_range(8):
            factor = tl.load(x_rows + block * BLOCK + phase * (BLOCK // 8), present[:, None], 0.0)
            gate = tl.dot(gates[phase], tl.trans(factor), gate)
        ups = _load_phases(up_words, up_sf, row, row_present, block, depth, WHOLE)
        for phase in tl.static_range(8):  # the same loads once more, which the compiler does once
            factor = tl.load(x_rows + block * BLOCK + phase * (BLOCK // 8), present[:, None], 0.0)
            up = tl.dot(ups[phase], tl.trans(factor), up)
    weight = tl.load(topk_weights + pair, present, 0.0)
    value = clamped_swiglu(gate, up, limit) * weight[None, :]
    tl.static_assert(ROWS <= 64, "one or two groups of 32 channels share an FP8 scale each")
    is_first = (tl.arange(0, ROWS) < 32)[:, None]
    first = tl.max(tl.where(is_first, tl.abs(value), 0.0), 0)
    second = tl.max(tl.where(is_first, 0.0, tl.abs(value)), 0)
    scale = fp8_group_sf(tl.where(is_first, first[None, :], second[None, :]))
    rounded = round_e4m3(value * reciprocal_of_power(scale)) * scale
    place = activation + pair[None, :] * activation_row + place_of(row)[:, None]
    tl.store(place, rounded.to(tl.bfloat16), row_present[:, None] & present[None, :])


@triton.jit
def _down(
    activation,
    words,
    sf,
    products,
    tile_pairs,
    tile_experts,
    num_pairs,
    hidden_size,
    depth,
    blocks,
    activation_row,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    tile = tl.program_id(0)
    if tl.load(tile_pairs + tile * TOKENS) >= num_pairs:
        return
    pair = tl.load(tile_pairs + tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    present = pair < num_pairs
    expert = tl.load(tile_experts + tile).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_present = row < hidden_size
    words += expert * hidden_size * (depth // 8)
    sf += expert * hidden_size * (depth // (BLOCK if WHOLE else 32))
    channel = tl.arange(0, BLOCK // 8) * 8
    rows = activation + pair[:, None] * activation_row + tl.arange(0, BLOCK // 8)[None, :]
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for block in range(blocks):
        operands = _load_phases(words, sf, row, row_present, block, depth, WHOLE)
        for phase in tl.static_range(8):
            inside = present[:, None]
            if not WHOLE:  # what stands behind the last channel was never written
                inside = inside & (channel + block * BLOCK + phase < depth)[None, :]
            factor = tl.load(rows + block * BLOCK + phase * (BLOCK // 8), inside, 0.0)
            total = tl.dot(operands[phase], tl.trans(factor), total)
    place = products + pair[None, :] * hidden_size + row[:, None]
    tl.store(place, total, row_present[:, None] & present[None, :])


@triton.jit
def _sum_pairs(
    products, topk_ids, added, out, expert_start, num_experts, hidden_size, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """A token's products of local experts, added in the order of its ids, and then what is `added`."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(topk_ids + token * TOP_K + k) - expert_start
        local = (expert >= 0) & (expert < num_experts)
        pair = products + (token * TOP_K + k) * hidden_size + channel
        total += tl.load(pair, local & (channel < hidden_size), 0.0)
    if added is not None:
        total += tl.load(added + token * hidden_size + channel, channel < hidden_size, 0.0)
    tl.store(out + token * hidden_size + channel, total, channel < hidden_size)
