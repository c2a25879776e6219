"""`moe_experts` in Triton: two grouped products over packed FP4 experts, the activation between, and an ordered sum.

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
from deepinfer_plugin.kernels.triton_formats import row_rounded_to_fp8
from deepinfer_plugin.kernels.triton_launch import chained, follow, release
from deepinfer_plugin.kernels.triton_matmul import MIN_TOKENS, aligned_bf16, most_tokens, stages
from deepinfer_plugin.kernels.triton_packed import BLOCK, WORD, WORDS, add_block, add_tail
from deepinfer_plugin.kernels.triton_wide import TOGETHER, add_channels, decode, is_worth_decoding, place_of_program

ACTIVATION_BLOCK, SUM_BLOCK = 256, 1024  # channels of a program
WIDE_TOKENS, WIDE_ROWS = 256, 128  # of a program that multiplies with decoded weights


def moe_experts(
    x: torch.Tensor,
    w13: Fp4Weight,
    w2: Fp4Weight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_start: int,
    limit: float,
    round_activation: bool,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    if not (isinstance(w13, Fp4Weight) and isinstance(w2, Fp4Weight) and round_activation):
        raise NotImplementedError("moe_experts: in Triton experts must be packed FP4, their activation rounded to FP8")
    (num_tokens, hidden_size), (num_experts, _, width), top_k = x.shape, w2.shape, topk_ids.shape[1]
    out = torch.empty(num_tokens, hidden_size, dtype=torch.float32, device=x.device)
    if num_experts == 0 or topk_ids.numel() == 0:
        return out.zero_() if added is None else out.copy_(added)
    num_pairs = num_tokens * top_k
    decodes = all(is_worth_decoding(weight, num_pairs // num_experts) for weight in (w13, w2))
    most = 32 if target.compute_capability() == 100 else most_tokens()  # SM100: as `packed_tile` says
    tokens = min(most, max(MIN_TOKENS, triton.next_power_of_2(num_pairs // num_experts + 1)))
    product, tokens = (_wide_product, WIDE_TOKENS) if decodes else (_product, tokens)
    tile_pairs, tile_experts = pairs_in_tiles(topk_ids.flatten(), expert_start, num_experts, tokens)
    tiles = tile_pairs, tile_experts, num_pairs
    gate_up = product(aligned_bf16(x), w13, *tiles, top_k, tokens)
    activation = torch.empty(num_pairs, width, dtype=torch.bfloat16, device=x.device)
    _activate[(num_pairs, triton.cdiv(width, ACTIVATION_BLOCK))](
        *(gate_up, topk_weights, topk_ids, activation, width, limit, expert_start, num_experts, ACTIVATION_BLOCK),
        num_warps=1,
        **chained(),
    )
    products = product(activation, w2, *tiles, 1, tokens)
    _sum_pairs[(num_tokens, triton.cdiv(hidden_size, SUM_BLOCK))](
        *(products, topk_ids, added, out, expert_start, num_experts, hidden_size, top_k, SUM_BLOCK), **chained()
    )
    return out


def _product(
    x: torch.Tensor,
    weight: Fp4Weight,
    tile_pairs: torch.Tensor,
    tile_experts: torch.Tensor,
    num_pairs: int,
    pairs_of_row: int,
    tokens: int,
) -> torch.Tensor:
    """Each pair's row of x times its expert's weight: [num_pairs, N], fp32; pairs without a tile are not written."""
    _, columns, depth = weight.shape
    whole = depth % BLOCK.value == 0
    weight = weight.interleave()
    words, sf = weight.codes.view(torch.int32), weight.sf.view(torch.int32) if whole else weight.sf
    out = torch.empty(num_pairs, columns, dtype=torch.float32, device=x.device)
    rows, warps, num_stages = expert_tile(tokens)
    _expert_product[(len(tile_experts), triton.cdiv(columns, rows))](
        *(x, words, sf, out, tile_pairs, tile_experts, num_pairs, columns, depth, depth // BLOCK.value),
        *(pairs_of_row, x.stride(0)),
        WHOLE=whole,
        TOKENS=tokens,
        ROWS=rows,
        num_warps=warps,
        num_stages=num_stages,
        **chained(),
    )
    return out


def _wide_product(
    x: torch.Tensor,
    weight: Fp4Weight,
    tile_pairs: torch.Tensor,
    tile_experts: torch.Tensor,
    num_pairs: int,
    pairs_of_row: int,
    tokens: int,
) -> torch.Tensor:
    """`_product` of many pairs of every expert."""
    _, columns, depth = weight.shape
    out = torch.empty(num_pairs, columns, dtype=torch.float32, device=x.device)
    tiles, row_tiles = len(tile_experts), triton.cdiv(columns, WIDE_ROWS)
    _wide_expert_product[(tiles * row_tiles,)](
        *(x, decode(weight), out, tile_pairs, tile_experts, num_pairs, columns, depth, row_tiles, tiles),
        *(pairs_of_row, x.stride(0)),
        TOKENS=tokens,
        ROWS=WIDE_ROWS,
        DEPTH=64,
        TOGETHER=TOGETHER,
        num_warps=8,
        num_stages=4 if target.shared_memory_bytes() > 200 << 10 else 2,
        **chained(),
    )
    return out


@triton.jit
def _wide_expert_product(
    x,
    weight,
    out,
    tile_pairs,
    tile_experts,
    num_pairs,
    columns,
    depth,
    row_tiles,
    tiles,
    pairs_of_row,
    x_row,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    follow()
    row_tile, tile = place_of_program(row_tiles, tiles, TOGETHER)
    if tl.load(tile_pairs + tile * TOKENS) >= num_pairs:
        return
    pair = tl.load(tile_pairs + tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    weight_rows = weight + (expert * columns + tl.minimum(row, columns - 1)) * depth
    x_rows = x + tl.minimum(pair, num_pairs - 1) // pairs_of_row * x_row
    total = add_channels(tl.zeros([ROWS, TOKENS], tl.float32), weight_rows, x_rows, 0, depth, DEPTH)
    release()
    tl.store(
        out + pair[None, :] * columns + row[:, None], total, (row < columns)[:, None] & (pair < num_pairs)[None, :]
    )


def expert_tile(tokens: int) -> tuple[int, int, int]:
    """Weight rows of a program, its warps and its stages. 64 rows take at most four warps: more would share rows."""
    rows, warps = (64, 2) if tokens <= 32 else (64, 4) if tokens <= 64 else (128, 8)
    return rows, warps, stages(rows * BLOCK.value // 2, rows, tokens, 3)


@triton.jit
def _expert_product(
    x,
    words,
    sf,
    out,
    tile_pairs,
    tile_experts,
    num_pairs,
    columns,
    depth,
    blocks,
    pairs_of_row,
    x_row,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """WHOLE: depth is a multiple of BLOCK, and `sf` holds four bytes of a row in an int32, block by block."""
    follow()
    tile = tl.program_id(0)
    if tl.load(tile_pairs + tile * TOKENS) >= num_pairs:
        return
    pair = tl.load(tile_pairs + tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    present = pair < num_pairs
    expert = tl.load(tile_experts + tile).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_present = row < columns
    word = tl.arange(0, WORDS)
    x_rows = x + (pair // pairs_of_row)[:, None] * x_row + word[None, :]
    word_rows = words + (expert * columns + row)[:, None] * (depth // WORD) + word[None, :]
    sf_rows = sf + expert * columns * (depth // (BLOCK if WHOLE else 32)) + row * (1 if WHOLE else depth // 32)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for block in range(blocks):
        total = add_block(total, word_rows, sf_rows, columns, x_rows, block, row_present, present, WHOLE, True)
    if not WHOLE:
        total = add_tail(total, word_rows, sf_rows, x_rows, depth, row_present, present, True)
    release()
    tl.store(out + pair[None, :] * columns + row[:, None], total, row_present[:, None] & present[None, :])


@triton.jit
def _activate(
    gate_up,
    topk_weights,
    topk_ids,
    activation,
    width,
    limit,
    expert_start,
    num_experts,
    CHANNELS: tl.constexpr,
):
    """``round_fp8(swiglu(gate, up) * weight)`` of some channels of a local pair."""
    follow()
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(topk_ids + pair) - expert_start
    if (expert < 0) | (expert >= num_experts):
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    row = gate_up + pair * 2 * width + channel
    gate, up = tl.load(row, channel < width, 0.0), tl.load(row + width, channel < width, 0.0)
    value = row_rounded_to_fp8(clamped_swiglu(gate, up, limit) * tl.load(topk_weights + pair))
    tl.store(activation + pair * width + channel, value.to(tl.bfloat16), channel < width)


@triton.jit
def _sum_pairs(
    products, topk_ids, added, out, expert_start, num_experts, hidden_size, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """A token's products of local experts, added in the order of its ids, and then what is `added`."""
    follow()
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
