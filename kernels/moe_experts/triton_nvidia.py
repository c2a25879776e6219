"""`moe_experts` in Triton: two grouped products over packed FP4 experts, and an ordered sum.

Pairs (token, expert) are sorted by expert into tiles; a tile's rows see one expert. What a row computes does not depend
on its tile: weights are the instruction's rows and tokens its columns, and K is summed in one order.
"""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.fake_quant.triton_nvidia import round_fp8
from deepinfer_plugin.kernels.moe_experts.tiles import pairs_in_tiles
from deepinfer_plugin.kernels.packed_weights import Fp4Weight
from deepinfer_plugin.kernels.swiglu.triton_nvidia import clamped_swiglu
from deepinfer_plugin.kernels.triton_formats import fp4_tiles, fp8_group_sf, reciprocal_of_power, round_e4m3

ROWS = 64  # of weights in a tile
HALF_DEPTH = 32  # bytes of weights, each of two channels, in a step; part of the order of a sum
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
) -> torch.Tensor:
    if not (isinstance(w13, Fp4Weight) and isinstance(w2, Fp4Weight) and round_input):
        raise NotImplementedError("moe_experts: in Triton experts must be packed FP4 and their inputs rounded to FP8")
    (num_tokens, hidden_size), (num_experts, _, width), top_k = x.shape, w2.shape, topk_ids.shape[1]
    out = torch.empty(num_tokens, hidden_size, dtype=torch.float32, device=x.device)
    if num_experts == 0 or topk_ids.numel() == 0:
        return out.zero_()
    num_pairs = num_tokens * top_k
    tokens = min(64, max(16, triton.next_power_of_2(num_pairs // num_experts + 1)))
    tile_pairs, tile_experts = pairs_in_tiles(topk_ids.flatten() - expert_start, num_experts, tokens)
    num_tiles = len(tile_experts)
    inputs = _split_channels(round_fp8(x).to(torch.bfloat16))
    activation = x.new_empty(num_pairs, 2, width // 2, dtype=torch.bfloat16)
    products = x.new_empty(num_pairs, hidden_size, dtype=torch.float32)
    options = {"TOKENS": tokens, "ROWS": ROWS, "HALF_DEPTH": HALF_DEPTH, "num_warps": 4 if tokens <= 32 else 8}
    _gate_up[(num_tiles, triton.cdiv(width, ROWS))](
        *(inputs, w13.codes, w13.sf, topk_weights, activation, tile_pairs, tile_experts, num_pairs, width),
        *(hidden_size, limit, top_k),
        **options,
        num_stages=4,
    )
    _down[(num_tiles, triton.cdiv(hidden_size, ROWS))](
        *(activation, w2.codes, w2.sf, products, tile_pairs, tile_experts, num_pairs, hidden_size, width),
        **options,
        num_stages=4,
    )
    _sum_pairs[(num_tokens, triton.cdiv(hidden_size, SUM_BLOCK))](
        *(products, topk_ids, out, expert_start, num_experts, hidden_size, top_k, SUM_BLOCK)
    )
    return out


def _split_channels(x: torch.Tensor) -> torch.Tensor:
    """[n, K] -> [n, 2, K / 2], the even channels first: those of the low nibbles, then of the high ones."""
    return x.view(x.shape[0], -1, 2).mT.contiguous()


@triton.jit
def _fp4_product(
    total, x, codes, sf, token_rows, present, row, num_rows, half_depth, ROWS: tl.constexpr, HALF_DEPTH: tl.constexpr
):
    """total[row, token] += weight[row] . x[token]; x: [n, 2, half_depth]. token_rows: rows of x, any if not present."""
    x_rows = x + token_rows[:, None] * (2 * half_depth)
    row_present = row < num_rows
    for first in range(0, half_depth, HALF_DEPTH):
        byte = first + tl.arange(0, HALF_DEPTH)
        inside = present[:, None] & (byte < half_depth)[None, :]
        even = tl.load(x_rows + byte[None, :], inside, 0.0)
        odd = tl.load(x_rows + half_depth + byte[None, :], inside, 0.0)
        group = first // 16 + tl.arange(0, HALF_DEPTH // 16)
        grouped = first + tl.arange(0, HALF_DEPTH // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        code = tl.load(
            codes + row.to(tl.int64)[:, None, None] * half_depth + grouped[None, :, :],
            row_present[:, None, None] & (grouped < half_depth)[None, :, :],
            0,
        )
        scale = tl.load(
            sf + row.to(tl.int64)[:, None] * (half_depth // 16) + group[None, :],
            row_present[:, None] & (group * 16 < half_depth)[None, :],
            0,
        )
        low, high = fp4_tiles(code, scale[:, :, None])
        total = tl.dot(tl.reshape(low, [ROWS, HALF_DEPTH]), tl.trans(even), total)
        total = tl.dot(tl.reshape(high, [ROWS, HALF_DEPTH]), tl.trans(odd), total)
    return total


@triton.jit
def _gate_up(
    x,
    codes,
    sf,
    topk_weights,
    activation,
    tile_pairs,
    tile_experts,
    num_pairs,
    width,
    depth,
    limit,
    top_k,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_DEPTH: tl.constexpr,
):
    """``round_fp8(swiglu(w13 @ x) * weight)`` of a tile's pairs, even channels first."""
    tile = tl.program_id(0)
    if tl.load(tile_pairs + tile * TOKENS) >= num_pairs:
        return
    pair = tl.load(tile_pairs + tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    present = pair < num_pairs
    expert = tl.load(tile_experts + tile).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    half = depth // 2
    gate_codes, gate_sf = codes + expert * 2 * width * half, sf + expert * 2 * width * (half // 16)
    up_codes, up_sf = gate_codes + width * half, gate_sf + width * (half // 16)
    zeros = tl.zeros([ROWS, TOKENS], tl.float32)
    tokens = pair // top_k
    gate = _fp4_product(zeros, x, gate_codes, gate_sf, tokens, present, row, width, half, ROWS, HALF_DEPTH)
    up = _fp4_product(zeros, x, up_codes, up_sf, tokens, present, row, width, half, ROWS, HALF_DEPTH)
    weight = tl.load(topk_weights + pair, present, 0.0)
    value = clamped_swiglu(gate, up, limit) * weight[None, :]
    tl.static_assert(ROWS == 64, "two groups of 32 channels share an FP8 scale each")
    is_first = (tl.arange(0, ROWS) < 32)[:, None]
    first = tl.max(tl.where(is_first, tl.abs(value), 0.0), 0)
    second = tl.max(tl.where(is_first, 0.0, tl.abs(value)), 0)
    scale = fp8_group_sf(tl.where(is_first, first[None, :], second[None, :]))
    rounded = round_e4m3(value * reciprocal_of_power(scale)) * scale
    place = activation + pair[None, :] * width + (row % 2 * (width // 2) + row // 2)[:, None]
    tl.store(place, rounded.to(tl.bfloat16), (row < width)[:, None] & present[None, :])


@triton.jit
def _down(
    activation,
    codes,
    sf,
    products,
    tile_pairs,
    tile_experts,
    num_pairs,
    hidden_size,
    width,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_DEPTH: tl.constexpr,
):
    tile = tl.program_id(0)
    if tl.load(tile_pairs + tile * TOKENS) >= num_pairs:
        return
    pair = tl.load(tile_pairs + tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    present = pair < num_pairs
    expert = tl.load(tile_experts + tile).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    half = width // 2
    codes += expert * hidden_size * half
    sf += expert * hidden_size * (half // 16)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    total = _fp4_product(total, activation, codes, sf, pair, present, row, hidden_size, half, ROWS, HALF_DEPTH)
    place = products + pair[None, :] * hidden_size + row[:, None]
    tl.store(place, total, (row < hidden_size)[:, None] & present[None, :])


@triton.jit
def _sum_pairs(
    products, topk_ids, out, expert_start, num_experts, hidden_size, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """A token's products of local experts, added in the order of its ids."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(topk_ids + token * TOP_K + k) - expert_start
        local = (expert >= 0) & (expert < num_experts)
        pair = products + (token * TOP_K + k) * hidden_size + channel
        total += tl.load(pair, local & (channel < hidden_size), 0.0)
    tl.store(out + token * hidden_size + channel, total, channel < hidden_size)
