"""The Triton matrix products of `linear`, `linear_fp8` and `grouped_linear`.

A result has the same bits in every batch: weights are always the instruction's rows and tokens its columns, and the sum
over K is cut into pieces that are added in order. For few tokens every piece has a program of its own, so that enough
of them read weights, and whoever finishes a tile's last piece adds them; for many, one program computes a tile's pieces
one after the other.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels import target
from deepinfer_plugin.kernels.packed_weights import Fp8Weight
from deepinfer_plugin.kernels.triton_phases import (
    BLOCK,
    FP8_BIAS,
    Phased,
    factor_words,
    in_phases,
    load_scales,
    num_blocks,
    phases,
)

PIECE = 1024  # of K, of a plain product
PROGRAMS = 384  # that a packed product should have for few tokens
MIN_PIECE = 4  # blocks of K in a piece of a packed product
MAX_SPLIT_TOKENS = 128  # from there on tiles alone fill the machine
MAX_TILES = 1 << 16  # of a product whose pieces are split


def matmul(
    x: torch.Tensor, weight: torch.Tensor | Fp8Weight, out_dtype: torch.dtype, round_to_fp8: bool = False
) -> torch.Tensor:
    """``out[t, g] = x[t, g] @ weight[g].T``, summed in fp32, rounded once.

    Products are exact where both factors are bf16 (or FP8); otherwise they are those of fp32.

    Args:
        x: [num_tokens, G, K], bf16 or fp32.
        weight: [G * N, K], bf16, fp32 or FP8; FP8 needs an x that is exact in bf16.
        round_to_fp8: round x first; for FP8 weights.

    Returns:
        [num_tokens, G, N], `out_dtype`, contiguous.
    """
    if isinstance(weight, Fp8Weight):
        rows = in_phases(x.reshape(-1, x.shape[2]), round_to_fp8).values
        return packed_matmul(Phased(rows.view(*x.shape[:2], rows.shape[1]), x.shape[2]), weight, out_dtype)
    num_tokens, groups, depth = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    columns = weight.shape[0] // groups
    tile = _Tile(num_tokens, max(1, triton.cdiv(depth, PIECE)), 64)
    out = torch.empty(num_tokens, groups, columns, dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    exact = x.dtype == weight.dtype == torch.bfloat16
    tiles = triton.cdiv(columns, tile.rows)
    parts, finished = tile.workspace(out)
    _matmul[(groups * tiles, triton.cdiv(num_tokens, tile.tokens), tile.splits)](
        *(x, weight, out, parts, finished, num_tokens, columns, depth, groups, tiles),
        *(x.stride(0), x.stride(1), weight.stride(0), out.numel()),
        EXACT=exact,
        PIECES=tile.pieces,
        SPLIT=tile.splits > 1,
        PIECE=PIECE,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        DEPTH=64 if exact else 32,
        num_warps=4 if tile.tokens <= 64 else 8,
        num_stages=4 if exact else 2,
    )
    return out


def packed_matmul(x: Phased, weight: Fp8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """``out[t, g] = x[t, g] @ weight[g].T``. x: [num_tokens, G, .] in phases; weight: [G * N, K]; as `matmul`."""
    num_tokens, groups, _ = x.values.shape
    columns, blocks = weight.shape[0] // groups, num_blocks(x.depth)
    out = torch.empty(num_tokens, groups, columns, dtype=out_dtype, device=x.values.device)
    if not out.numel():
        return out
    # by the weight's shape alone: the cut is part of the order of a sum
    pieces = min(triton.cdiv(PROGRAMS * 64, weight.shape[0]), triton.cdiv(blocks, MIN_PIECE))
    rows, warps, stages = packed_tile(num_tokens)
    tile = _Tile(num_tokens, pieces, rows)
    tiles = triton.cdiv(columns, tile.rows)
    whole = x.depth % BLOCK.value == 0
    words = weight.interleave().codes.view(torch.int64)
    sf = weight.sf.view(torch.int32) if whole else weight.sf
    parts, finished = tile.workspace(out)
    _packed_matmul[(groups * tiles, triton.cdiv(num_tokens, tile.tokens), tile.splits)](
        *(x.values, words, sf, out, parts, finished, num_tokens, columns, x.depth, blocks, groups, tiles),
        *(x.values.stride(0), x.values.stride(1), words.stride(0), sf.stride(0), out.numel()),
        WHOLE=whole,
        PIECES=pieces,
        SPLIT=tile.splits > 1,
        PIECE=triton.cdiv(blocks, pieces),
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def most_tokens() -> int:
    """Tokens of a tile that a program's registers hold: as many again where sums are a warp group's."""
    return 128 if target.compute_capability() in (0, 90) else 64


def packed_tile(num_tokens: int) -> tuple[int, int, int]:
    """Weight rows of a program, its warps and its stages. 64 rows take at most four warps: more would share rows.

    Triton 3.6 makes no SM100 code of sums in tensor memory that are set back in a loop: many tokens take the older
    instructions there.
    """
    many = num_tokens > MAX_SPLIT_TOKENS and most_tokens() == 128
    rows, warps = (128, 8) if many else (64, 2)
    tokens = min(most_tokens(), max(16, triton.next_power_of_2(num_tokens)))
    return rows, warps, stages(rows * BLOCK.value, rows, tokens, 3)


def stages(weight_bytes: int, rows: int, tokens: int, most: int) -> int:
    """Stages of a packed product that fit: a stage holds a block's words and inputs, beside one decoded block."""
    decoded, inputs = 2 * BLOCK.value * rows, 2 * BLOCK.value * tokens
    return max(1, min(most, (target.shared_memory_bytes() - decoded) // (weight_bytes + inputs)))


class _Tile:
    """How one product is cut: tokens and weight rows of a program, and who sums the pieces of K."""

    def __init__(self, num_tokens: int, pieces: int, rows: int) -> None:
        self.pieces, self.rows = pieces, rows
        self.splits = pieces if num_tokens <= MAX_SPLIT_TOKENS else 1
        self.tokens = min(most_tokens(), max(16, triton.next_power_of_2(num_tokens)))

    def workspace(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where split pieces leave their parts, and who counts them."""
        if self.splits == 1:
            return out, out
        return out.new_empty(self.splits, *out.shape, dtype=torch.float32), _finished_pieces(out.device)


@cache
def _finished_pieces(device: torch.device) -> torch.Tensor:
    """Zeros between products: whoever finishes a tile sets its count back. For products on one stream."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@triton.jit
def _matmul(
    x,
    weight,
    out,
    parts,
    finished,
    num_tokens,
    columns,
    depth,
    groups,
    tiles,
    x_token,
    x_group,
    weight_row,
    out_size,
    EXACT: tl.constexpr,
    PIECES: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    group = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    weight_rows = weight + (group * columns + row).to(tl.int64)[:, None] * weight_row
    x_rows = x + token[:, None] * x_token + group * x_group
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    first, last = (tl.program_id(2), tl.program_id(2) + 1) if SPLIT else (0, PIECES)
    for piece in range(first, last):
        part = tl.zeros([ROWS, TOKENS], tl.float32)
        for k in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, depth), DEPTH):
            column = k + tl.arange(0, DEPTH)
            inside = (column < depth)[None, :]
            factor = tl.load(x_rows + column[None, :], (token < num_tokens)[:, None] & inside, 0.0)
            tile = tl.load(weight_rows + column[None, :], (row < columns)[:, None] & inside, 0.0)
            if EXACT:
                part = tl.dot(tile, tl.trans(factor), part)
            else:
                part = tl.dot(tile.to(tl.float32), tl.trans(factor.to(tl.float32)), part, input_precision="ieee")
        total += part
    place = (token[None, :] * groups + group) * columns + row[:, None]
    present = (row < columns)[:, None] & (token < num_tokens)[None, :]
    if SPLIT:
        _finish(total, out, parts, finished, place, present, out_size, PIECES)
    else:
        tl.store(out + place, total.to(out.dtype.element_ty), present)


@triton.jit
def _packed_matmul(
    x,
    words,
    sf,
    out,
    parts,
    finished,
    num_tokens,
    columns,
    depth,
    blocks,
    groups,
    tiles,
    x_token,
    x_group,
    words_row,
    sf_row,
    out_size,
    WHOLE: tl.constexpr,
    PIECES: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """WHOLE: depth is a multiple of BLOCK, and `sf` holds four bytes of a row in an int32."""
    group = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    weight_row = (group * columns + row).to(tl.int64)
    word, row_present, token_present = tl.arange(0, BLOCK // 8), row < columns, token < num_tokens
    word_rows = words + weight_row[:, None] * words_row + word[None, :]
    sf_rows = sf + weight_row // 32 * sf_row
    x_rows = x + token[:, None] * x_token + group * x_group + word[None, :]
    first = tl.program_id(2) * PIECE if SPLIT else 0
    last = tl.minimum(first + PIECE, blocks) if SPLIT else blocks
    total, part = tl.zeros([ROWS, TOKENS], tl.float32), tl.zeros([ROWS, TOKENS], tl.float32)
    for block in range(first, last):
        if WHOLE:
            tile = tl.load(word_rows + block * (BLOCK // 8), row_present[:, None], 0)
            scales = tl.load(sf_rows + block, row_present, 0)
        else:
            inside = (word + block * (BLOCK // 8)) * 8 < depth
            tile = tl.load(word_rows + block * (BLOCK // 8), row_present[:, None] & inside[None, :], 0)
            scales = load_scales(sf_rows, block, depth // 32, row_present)
        operands = phases(tile, factor_words(scales, FP8_BIAS), False)
        for phase in tl.static_range(8):
            factor = tl.load(x_rows + block * BLOCK + phase * (BLOCK // 8), token_present[:, None], 0.0)
            part = tl.dot(operands[phase], tl.trans(factor), part)
        if not SPLIT and PIECES > 1:  # noqa: SIM102 (the first is the compiler's, the second the program's)
            if (block + 1) % PIECE == 0:
                total += part
                part = tl.zeros([ROWS, TOKENS], tl.float32)
    total += part
    place = (token[None, :] * groups + group) * columns + row[:, None]
    present = row_present[:, None] & token_present[None, :]
    if SPLIT:
        _finish(total, out, parts, finished, place, present, out_size, PIECES)
    else:
        tl.store(out + place, total.to(out.dtype.element_ty), present)


@triton.jit
def _finish(total, out, parts, finished, place, present, out_size, num_pieces):
    """Leave this piece's `total`; the last to come adds all pieces of the tile in order and stores the sum."""
    split = tl.program_id(2).to(tl.int64)
    tl.store(parts + split * out_size + place, total, present)
    tile = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    tl.debug_barrier()  # all threads' parts come before the count
    if tl.atomic_add(finished + tile, 1, sem="acq_rel") == num_pieces - 1:
        total = tl.zeros(total.shape, tl.float32)
        for piece in range(num_pieces):
            part = parts + tl.cast(piece, tl.int64) * out_size + place
            total += tl.load(part, present, 0.0, cache_modifier=".cg")
        tl.store(out + place, total.to(out.dtype.element_ty), present)
        tl.store(finished + tile, 0)
