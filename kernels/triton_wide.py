"""Products of packed weights with many tokens: a weight is decoded once to bf16, which is exact, and then multiplied.

The sums have the bits of `triton_matmul` and `moe_experts`: the same instruction takes the same 16 channels in the same
order, from shared memory instead of registers.
"""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels import target
from deepinfer_plugin.kernels.packed_weights import Fp4Weight, Fp8Weight
from deepinfer_plugin.kernels.triton_launch import chained, follow
from deepinfer_plugin.kernels.triton_packed import BLOCK, WORDS, decoded_phase

SEEN = (0, 90)  # compute capabilities where those bits are the same
MIN_TOKENS = 512  # of one weight, for which decoding it once is worth the bytes
MAX_DECODED_BYTES = 2 << 30
ROWS, BLOCKS = 64, 4  # of a program that decodes
TOGETHER = 16  # tiles of tokens that are multiplied with a weight's rows before the next rows


def is_worth_decoding(weight: Fp8Weight | Fp4Weight, tokens_of_a_weight: int) -> bool:
    """Whether a product of so many tokens decodes `weight` first. Only whole blocks have the same order of sums."""
    return (
        target.compute_capability() in SEEN
        and tokens_of_a_weight >= MIN_TOKENS
        and weight.shape[-1] % BLOCK.value == 0
        and 2 * weight.shape.numel() <= MAX_DECODED_BYTES
    )


def decode(weight: Fp8Weight | Fp4Weight) -> torch.Tensor:
    """The weight's values, bf16, in its shape: exact. Its rows are whole blocks."""
    weight, is_fp4 = weight.interleave(), isinstance(weight, Fp4Weight)
    depth = weight.shape[-1]
    words = weight.codes.view(torch.int32 if is_fp4 else torch.int64).view(-1, depth // 8)
    out = torch.empty(weight.shape, dtype=torch.bfloat16, device=words.device)
    blocks = depth // BLOCK.value
    if out.numel():
        _decode[(triton.cdiv(len(words), ROWS), triton.cdiv(blocks, BLOCKS))](
            *(words, weight.sf.view(torch.int32), out, len(words), weight.shape[-2], blocks),
            FP4=is_fp4,
            ROWS=ROWS,
            BLOCKS=BLOCKS,
            num_warps=4,
            **chained(),
        )
    return out


@triton.jit
def _decode(
    words,
    sf,
    out,
    num_rows,
    columns,
    num_blocks,
    FP4: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    follow()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    word, row_present = tl.arange(0, WORDS), row < num_rows
    for n in tl.static_range(BLOCKS):
        block = tl.program_id(1) * BLOCKS + n
        present = row_present & (block < num_blocks)
        place = row * num_blocks + block
        tile = tl.load(words + place[:, None] * WORDS + word[None, :], present[:, None], 0)
        sf_place = (
            (row // columns * num_blocks + block) * columns + row % columns if FP4 else row // 32 * num_blocks + block
        )
        scales = tl.load(sf + sf_place, present, 0)
        for phase in tl.static_range(8):
            values = decoded_phase(tile, scales, phase, phase // 2, FP4)
            tl.store(out + place[:, None] * BLOCK + phase * WORDS + word[None, :], values, present[:, None])


@triton.jit
def add_channels(total, weight_rows, x_rows, first, last, DEPTH: tl.constexpr):
    """``total + weight @ x.T`` of channels [first, last): fp32 [rows, tokens], from pointers to rows of bf16."""
    for k in range(first, last, DEPTH):
        channel = k + tl.arange(0, DEPTH)
        weight = tl.load(weight_rows[:, None] + channel[None, :])
        total = tl.dot(weight, tl.trans(tl.load(x_rows[:, None] + channel[None, :])), total)
    return total


@triton.jit
def place_of_program(row_tiles, token_tiles, TOGETHER: tl.constexpr):
    """(row tile, token tile) of this program, so that those which run together share what they read."""
    program = tl.program_id(0)
    band = program // (TOGETHER * row_tiles) * TOGETHER
    width = tl.minimum(token_tiles - band, TOGETHER)
    inside = program % (TOGETHER * row_tiles)
    return inside // width, band + inside % width
