"""The Triton matrix product of `linear`, `linear_fp8` and `grouped_linear`.

A result has the same bits in every batch: weights are always the instruction's rows and tokens its columns, and the sum
over K is cut into pieces of PIECE columns that are added in order. For few tokens every piece has a program of its own,
so that enough of them read weights; for many, one program computes a tile's pieces one after the other.
"""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.packed_weights import Fp8Weight
from deepinfer_plugin.kernels.triton_formats import fp8_tile

PIECE = 1024
ROWS = 64  # weights of a tile
MAX_SPLIT_TOKENS = 64  # from there on tiles alone fill the machine
MAX_TOKENS = 128  # of a tile
ADD_BLOCK = 1024


def matmul(x: torch.Tensor, weight: torch.Tensor | Fp8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """``out[t, g] = x[t, g] @ weight[g].T``, summed in fp32, rounded once.

    Products are exact where both factors are bf16 (or FP8); otherwise they are those of fp32.

    Args:
        x: [num_tokens, G, K], bf16 or fp32.
        weight: [G * N, K], bf16, fp32 or FP8; FP8 needs an x that is exact in bf16.

    Returns:
        [num_tokens, G, N], `out_dtype`, contiguous.
    """
    num_tokens, groups, depth = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    codes = weight.codes if isinstance(weight, Fp8Weight) else weight
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    columns = codes.shape[0] // groups
    out = torch.empty(num_tokens, groups, columns, dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    pieces = max(1, triton.cdiv(depth, PIECE))
    splits = pieces if num_tokens <= MAX_SPLIT_TOKENS else 1
    target = out if splits == 1 else out.new_empty(splits, *out.shape, dtype=torch.float32)
    tokens = min(MAX_TOKENS, max(16, triton.next_power_of_2(num_tokens)))
    tiles = triton.cdiv(columns, ROWS)
    is_fp8 = isinstance(weight, Fp8Weight)
    exact = is_fp8 or x.dtype == codes.dtype == torch.bfloat16
    _matmul[(groups * tiles, triton.cdiv(num_tokens, tokens), splits)](
        *(x, codes, weight.sf if is_fp8 else None, target, num_tokens, columns, depth, groups, tiles),
        *(x.stride(0), x.stride(1), codes.stride(0), weight.sf.stride(0) if is_fp8 else 0, out.numel()),
        IS_FP8=is_fp8,
        EXACT=exact,
        PIECES=pieces // splits,
        PIECE=PIECE,
        ROWS=ROWS,
        TOKENS=tokens,
        DEPTH=32 if not exact else 128 if is_fp8 and tokens <= 64 else 64,
        num_warps=4 if tokens <= 64 else 8,
        num_stages=4 if exact else 2,
    )
    if splits > 1:
        _add[(triton.cdiv(out.numel(), ADD_BLOCK),)](target, out, out.numel(), splits, ADD_BLOCK)
    return out


@triton.jit
def _matmul(
    x,
    weight,
    sf,
    out,
    num_tokens,
    columns,
    depth,
    groups,
    tiles,
    x_token,
    x_group,
    weight_row,
    sf_row,
    out_size,
    IS_FP8: tl.constexpr,
    EXACT: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    group = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    split = tl.program_id(2)
    weight_row_id = (group * columns + row).to(tl.int64)
    x_rows = x + token[:, None] * x_token + group * x_group
    x_present = (token < num_tokens)[:, None]
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for piece in range(split * PIECES, (split + 1) * PIECES):
        part = tl.zeros([ROWS, TOKENS], tl.float32)
        for k in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, depth), DEPTH):
            column = k + tl.arange(0, DEPTH)
            factor = tl.load(x_rows + column[None, :], x_present & (column < depth)[None, :], 0.0)
            if IS_FP8:
                grouped = k + tl.arange(0, DEPTH // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
                present = (row < columns)[:, None, None] & (grouped < depth)[None, :, :]
                codes = tl.load(weight + weight_row_id[:, None, None] * weight_row + grouped[None, :, :], present, 0)
                block = (k // 32 + tl.arange(0, DEPTH // 32))[None, :]
                scales = tl.load(
                    sf + (weight_row_id // 32)[:, None] * sf_row + block,
                    (row < columns)[:, None] & (block * 32 < depth),
                    0,
                )
                tile = tl.reshape(fp8_tile(codes, scales[:, :, None]), [ROWS, DEPTH])
            else:
                present = (row < columns)[:, None] & (column < depth)[None, :]
                tile = tl.load(weight + weight_row_id[:, None] * weight_row + column[None, :], present, 0.0)
            if EXACT:
                part = tl.dot(tile, tl.trans(factor.to(tl.bfloat16)), part)
            else:
                part = tl.dot(tile.to(tl.float32), tl.trans(factor.to(tl.float32)), part, input_precision="ieee")
        total += part
    place = out + split.to(tl.int64) * out_size + (token[None, :] * groups + group) * columns + row[:, None]
    tl.store(place, total.to(out.dtype.element_ty), (row < columns)[:, None] & (token < num_tokens)[None, :])


@triton.jit
def _add(parts, out, size, num_parts, BLOCK: tl.constexpr):
    """The sum of `num_parts` tensors that lie one behind the other, in their order."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + tl.cast(part, tl.int64) * size + element, element < size, 0.0)
    tl.store(out + element, total.to(out.dtype.element_ty), element < size)
