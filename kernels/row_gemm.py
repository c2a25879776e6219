"""Matrix products whose rows do not see each other: bitwise the same row alone, in any batch and in any order.

`torch.mm` takes other code for few rows than for many. A batched product over tiles of a fixed height is the same problem
for every tile, but the CPU library still cuts a long sum in ways that depend on the number of tiles and of threads.
It leaves sums of at most `MAX_DEPTH` products whole, so longer ones are cut here, always at the same places.
"""

import torch
from torch.nn.functional import pad

TILE_SIZE = 16  # rows of a tile
MIN_COLUMNS = 16  # below 10 the CPU library's result depends on a row's place in its tile; found by trying 1..512
MAX_DEPTH = 256  # from 384 on, 8 threads give one tile other bits than two; found by trying 16..5120 with 1..32 threads
MAX_GATHER_BYTES = 64 << 20  # weights copied at a time by `tile_gemm`


def row_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight.T``, every row computed as if it were alone.

    Args:
        x: [num_tokens, K], fp32.
        weight: [N, K], fp32, rows contiguous (else the product may copy it).

    Returns:
        [num_tokens, N], fp32, contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"row_gemm: x must be [num_tokens, K] and weight [N, K], got {got}")
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        raise ValueError(f"row_gemm: x and weight must be fp32, got {x.dtype} and {weight.dtype}")
    num_tokens, width = x.shape
    num_columns = weight.shape[0]
    if num_columns < MIN_COLUMNS:
        return row_gemm(x, pad(weight, (0, 0, 0, MIN_COLUMNS - num_columns)))[:, :num_columns].contiguous()
    num_tiles = -(-num_tokens // TILE_SIZE)
    padding = num_tiles * TILE_SIZE - num_tokens
    tiles = (torch.constant_pad_nd(x, (0, 0, 0, padding)) if padding else x).reshape(num_tiles, TILE_SIZE, width)
    product = batch_gemm(tiles, weight.mT.expand(num_tiles, -1, -1)).view(-1, num_columns)
    return product[:num_tokens] if padding else product


def batch_gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b``: bitwise the same for a matrix alone, in any batch, and with any number of threads.

    Args:
        a: [batch_size, M, K], fp32.
        b: [batch_size, K, N], fp32.

    Returns:
        [batch_size, M, N], fp32, contiguous.
    """
    if a.shape[2] <= MAX_DEPTH:
        return torch.bmm(a, b)
    parts = zip(a.split(MAX_DEPTH, dim=2), b.split(MAX_DEPTH, dim=1), strict=True)
    product = torch.bmm(*next(parts))
    for part in parts:
        product += torch.bmm(*part)
    return product


def tile_gemm(tiles: torch.Tensor, weights: torch.Tensor, tile_weight_ids: torch.Tensor) -> torch.Tensor:
    """Return ``tiles[i] @ weights[tile_weight_ids[i]].T``: every tile has its own weight matrix (an expert's).

    Rows come out bitwise as `row_gemm` with that matrix would give them. Weights are gathered for a bounded number of
    tiles at a time; matrices too large to copy are used where they lie, which reads `tile_weight_ids` on the host.

    Args:
        tiles: [num_tiles, 16, K], fp32, contiguous.
        weights: [num_weights, N, K], fp32, N at least 16.
        tile_weight_ids: [num_tiles], int64, in [0, num_weights).

    Returns:
        [num_tiles, 16, N], fp32, contiguous.

    Raises:
        ValueError: shapes that do not fit.
    """
    if tiles.dim() != 3 or tiles.shape[1] != TILE_SIZE or weights.dim() != 3 or tiles.shape[2] != weights.shape[2]:
        got = f"{tuple(tiles.shape)} and {tuple(weights.shape)}"
        raise ValueError(f"tile_gemm: tiles must be [num_tiles, 16, K] and weights [num_weights, N, K], got {got}")
    num_tiles, num_columns = tiles.shape[0], weights.shape[1]
    if num_columns < MIN_COLUMNS:
        raise ValueError(f"tile_gemm: weights must have at least {MIN_COLUMNS} rows, got {num_columns}")
    chunk_size = MAX_GATHER_BYTES // max(1, num_columns * weights.shape[2] * weights.element_size())
    if num_tiles and chunk_size >= num_tiles:
        return batch_gemm(tiles, weights[tile_weight_ids].mT)
    product = tiles.new_empty(num_tiles, TILE_SIZE, num_columns)
    if chunk_size:
        for start in range(0, num_tiles, chunk_size):
            chunk = slice(start, start + chunk_size)
            product[chunk] = batch_gemm(tiles[chunk], weights[tile_weight_ids[chunk]].mT)
        return product
    for i, weight_id in enumerate(tile_weight_ids.tolist()):
        product[i : i + 1] = batch_gemm(tiles[i : i + 1], weights[weight_id : weight_id + 1].mT)
    return product
