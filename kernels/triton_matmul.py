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
from deepinfer_plugin.kernels.streams import is_beside
from deepinfer_plugin.kernels.triton_formats import rounded_to_fp8
from deepinfer_plugin.kernels.triton_launch import chained, fetch_ahead, follow, release
from deepinfer_plugin.kernels.triton_packed import BLOCK, WORD, WORDS, add_block, add_tail
from deepinfer_plugin.kernels.triton_wide import TOGETHER, add_channels, decode, is_worth_decoding, place_of_program

PIECE = 1024  # of K, of a plain product
PROGRAMS = 384  # that a packed product should have for few tokens
MIN_PIECE = 4  # blocks of K in a piece of a packed product
MAX_SPLIT_TOKENS = 128  # from there on tiles alone fill the machine
MIN_TOKENS = 8  # of a tensor core's columns
AHEAD = tl.constexpr(2)  # blocks that a program fetches while it waits; many would push others out of the cache
MAX_TILES = 1 << 16  # of a product whose pieces are split


def matmul(
    x: torch.Tensor, weight: torch.Tensor | Fp8Weight, out_dtype: torch.dtype, round_output: bool = False
) -> torch.Tensor:
    """``out[t, g] = x[t, g] @ weight[g].T``, summed in fp32, rounded once.

    Products are exact where both factors are bf16 (or FP8); otherwise they are those of fp32.

    Args:
        x: [num_tokens, G, K], bf16 or fp32; beside an FP8 weight exact in bf16.
        weight: [G * N, K], bf16, fp32 or FP8.
        round_output: round the result, in `out_dtype`, to FP8; beside an FP8 weight.

    Returns:
        [num_tokens, G, N], `out_dtype`, contiguous.
    """
    if isinstance(weight, Fp8Weight):
        return _packed_product(x, weight, out_dtype, round_output)
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
        **chained(),
    )
    return out


def _packed_product(x: torch.Tensor, weight: Fp8Weight, out_dtype: torch.dtype, round_output: bool) -> torch.Tensor:
    num_tokens, groups, depth = x.shape
    x = aligned_bf16(x)
    columns, blocks = weight.shape[0] // groups, depth // BLOCK.value
    out = torch.empty(num_tokens, groups, columns, dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    # by the weight's shape alone: the cut is part of the order of a sum
    pieces = max(1, min(triton.cdiv(PROGRAMS * 64, weight.shape[0]), triton.cdiv(blocks, MIN_PIECE)))
    piece = max(1, triton.cdiv(blocks, pieces))
    if is_worth_decoding(weight, num_tokens):
        _wide_product(x, decode(weight), out, piece * BLOCK.value, round_output)
        return out
    rows, warps, stages = packed_tile(num_tokens)
    tile = _Tile(num_tokens, pieces, rows)
    tiles = triton.cdiv(columns, tile.rows)
    whole = depth % BLOCK.value == 0
    words = weight.interleave().codes.view(torch.int64)
    sf = weight.sf.view(torch.int32) if whole else weight.sf
    parts, finished = tile.workspace(out)
    _packed_matmul[(groups * tiles, triton.cdiv(num_tokens, tile.tokens), tile.splits)](
        *(x, words, sf, out, parts, finished, num_tokens, columns, depth, blocks, groups, tiles),
        *(x.stride(0), x.stride(1), words.stride(0), sf.stride(0), out.numel()),
        WHOLE=whole,
        PIECES=pieces,
        SPLIT=tile.splits > 1,
        PIECE=piece,
        ROUND_OUTPUT=round_output,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        num_warps=warps,
        num_stages=stages,
        **chained(),
    )
    return out


def _wide_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, piece: int, round_output: bool) -> None:
    """Of many tokens and a decoded weight [G * N, K] whose sums are cut into pieces of so many channels."""
    num_tokens, groups, depth = x.shape
    columns = weight.shape[0] // groups
    is_cut = piece < depth
    rows, tokens = 128, 128 if is_cut else 256  # the pieces' sum takes as many registers as a piece
    row_tiles, token_tiles = groups * triton.cdiv(columns, rows), triton.cdiv(num_tokens, tokens)
    _wide_matmul[(row_tiles * token_tiles,)](
        *(x, weight, out, num_tokens, columns, depth, groups, row_tiles, token_tiles, x.stride(0), x.stride(1)),
        IS_CUT=is_cut,
        PIECE=piece,
        ROUND_OUTPUT=round_output,
        ROWS=rows,
        TOKENS=tokens,
        DEPTH=64,
        TOGETHER=TOGETHER,
        num_warps=8,
        num_stages=4 if target.shared_memory_bytes() > 200 << 10 else 2,
        **chained(),
    )


def aligned_bf16(x: torch.Tensor) -> torch.Tensor:
    """x in bf16, its rows where vectors of 16 bytes can be read."""
    aligned = x.stride(-1) == 1 and not any(stride % WORD.value for stride in (*x.stride()[:-1], x.storage_offset()))
    return (x if aligned else x.contiguous()).to(torch.bfloat16)


def most_tokens() -> int:
    """Tokens of a tile that a program's registers hold: as many again where sums are a warp group's."""
    return 128 if target.compute_capability() in (0, 90) else 64


def packed_tile(num_tokens: int) -> tuple[int, int, int]:
    """Weight rows of a program, its warps and its stages. 64 rows take at most four warps: more would share rows.

    Triton 3.6 makes no SM100 code of sums in tensor memory that are set back in a loop: many tokens take the older
    instructions there.
    """
    tokens = token_tile(num_tokens)
    rows, warps = (64, 2) if tokens < 32 else (128, 8) if most_tokens() == 128 else (64, 4)
    return rows, warps, stages(rows * BLOCK.value, rows, tokens, 2 if num_tokens > MAX_SPLIT_TOKENS else 3)


def token_tile(num_tokens: int) -> int:
    """Tokens of a program: a column of a tensor-core product is computed alike in any of them."""
    return min(most_tokens(), max(MIN_TOKENS, triton.next_power_of_2(num_tokens)))


def stages(weight_bytes: int, rows: int, tokens: int, most: int) -> int:
    """Stages of a packed product that fit: a stage holds a block's words and inputs.

    Beside them there is room for one decoded block, where a compiler does not decode in registers.
    """
    decoded, inputs = 2 * BLOCK.value * rows, 2 * BLOCK.value * tokens
    return max(1, min(most, (target.shared_memory_bytes() - decoded) // (weight_bytes + inputs)))


class _Tile:
    """How one product is cut: tokens and weight rows of a program, and who sums the pieces of K."""

    def __init__(self, num_tokens: int, pieces: int, rows: int) -> None:
        self.pieces, self.rows = pieces, rows
        self.splits = pieces if num_tokens <= MAX_SPLIT_TOKENS else 1
        self.tokens = token_tile(num_tokens)

    def workspace(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where split pieces leave their parts, and who counts them."""
        if self.splits == 1:
            return out, out
        finished = _finished_pieces(out.device)[int(is_beside(out.device))]
        return out.new_empty(self.splits, *out.shape, dtype=torch.float32), finished


@cache
def _finished_pieces(device: torch.device) -> torch.Tensor:
    """Zeros between products, for each stream: whoever finishes a tile sets its count back."""
    return torch.zeros(2, MAX_TILES, dtype=torch.int32, device=device)


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
    follow()
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
    release()
    place = (token[None, :] * groups + group) * columns + row[:, None]
    present = (row < columns)[:, None] & (token < num_tokens)[None, :]
    if SPLIT:
        _finish(total, out, parts, finished, place, present, out_size, PIECES, False)
    else:
        _store(total, out, place, present, False)


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
    ROUND_OUTPUT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """WHOLE: depth is a multiple of BLOCK, and `sf` holds four bytes of a row in an int32."""
    group = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    weight_row = (group * columns + row).to(tl.int64)
    first = tl.program_id(2) * PIECE if SPLIT else 0
    last = tl.minimum(first + PIECE, blocks) if SPLIT else blocks
    for block in range(first, tl.minimum(first + AHEAD, last)):
        fetch_ahead(words + tl.minimum(weight_row, columns * groups - 1) * words_row + block * WORDS)
    follow()
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    word, row_present, token_present = tl.arange(0, WORDS), row < columns, token < num_tokens
    word_rows = words + weight_row[:, None] * words_row + word[None, :]
    sf_rows = sf + weight_row // 32 * sf_row
    x_rows = x + token[:, None] * x_token + group * x_group + word[None, :]
    total, part = tl.zeros([ROWS, TOKENS], tl.float32), tl.zeros([ROWS, TOKENS], tl.float32)
    for block in range(first, last):
        part = add_block(part, word_rows, sf_rows, 1, x_rows, block, row_present, token_present, WHOLE, False)
        if not SPLIT and PIECES > 1:  # noqa: SIM102 (the first is the compiler's, the second the program's)
            if ((block + 1) % PIECE == 0) & (block + 1 < blocks):
                total += part
                part = tl.zeros([ROWS, TOKENS], tl.float32)
    if not WHOLE:  # noqa: SIM102
        if last == blocks:
            part = add_tail(part, word_rows, sf_rows, x_rows, depth, row_present, token_present, False)
    release()
    total += part
    place = (token[None, :] * groups + group) * columns + row[:, None]
    present = row_present[:, None] & token_present[None, :]
    if SPLIT:
        _finish(total, out, parts, finished, place, present, out_size, PIECES, ROUND_OUTPUT)
    else:
        _store(total, out, place, present, ROUND_OUTPUT)


@triton.jit
def _wide_matmul(
    x,
    weight,
    out,
    num_tokens,
    columns,
    depth,
    groups,
    row_tiles,
    token_tiles,
    x_token,
    x_group,
    IS_CUT: tl.constexpr,
    PIECE: tl.constexpr,
    ROUND_OUTPUT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Rows and tokens beyond the last are computed as the last, and not stored."""
    follow()
    row_tile, token_tile = place_of_program(row_tiles, token_tiles, TOGETHER)
    tiles = row_tiles // groups
    group = row_tile // tiles
    row = row_tile % tiles * ROWS + tl.arange(0, ROWS)
    token = (token_tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    weight_rows = weight + (group * columns + tl.minimum(row, columns - 1)).to(tl.int64) * depth
    x_rows = x + tl.minimum(token, num_tokens - 1) * x_token + group * x_group
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    if IS_CUT:
        for first in range(0, depth, PIECE):
            part = tl.zeros([ROWS, TOKENS], tl.float32)
            total += add_channels(part, weight_rows, x_rows, first, tl.minimum(first + PIECE, depth), DEPTH)
    else:
        total = add_channels(total, weight_rows, x_rows, 0, depth, DEPTH)
    release()
    place = (token[None, :] * groups + group) * columns + row[:, None]
    _store(total, out, place, (row < columns)[:, None] & (token < num_tokens)[None, :], ROUND_OUTPUT)


@triton.jit
def _store(total, out, place, present, ROUND: tl.constexpr):
    """ROUND: to FP8, groups of 32 rows of the weight, whose first the tile holds."""
    total = total.to(out.dtype.element_ty)
    if ROUND:
        groups: tl.constexpr = total.shape[0] // 32
        of_group = tl.reshape(total.to(tl.float32), [groups, 32, total.shape[1]])
        total = tl.reshape(rounded_to_fp8(of_group, 1), total.shape).to(total.dtype)
    tl.store(out + place, total, present)


@triton.jit
def _finish(total, out, parts, finished, place, present, out_size, num_pieces, ROUND: tl.constexpr):
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
        _store(total, out, place, present, ROUND)
        tl.store(finished + tile, 0)
