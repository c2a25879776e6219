"""Matrix products whose rows do not see each other: bitwise the same row alone, in any batch and in any order.

No product of torch has that property on a CPU: its library cuts sums and places rows in ways that depend on the numbers
of rows and of threads, and differently on every processor. `row_gemm.c` sums every element in one fixed order.

On other devices torch's batched product over tiles of a fixed height stands in; it is for comparisons only.
"""

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

TILE_SIZE = 4  # rows of a tile; as many as `row_gemm.c` computes at a time


def row_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight.T``, every row computed as if it were alone.

    Args:
        x: [num_tokens, K], fp32.
        weight: [N, K], fp32, rows contiguous (else the product copies it).

    Returns:
        [num_tokens, N], fp32, contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"row_gemm: x must be [num_tokens, K] and weight [N, K], got {got}")
    _check_fp32(x, weight)
    if x.is_cpu:
        return _compiled("gemm_nt", x.unsqueeze(0), weight.unsqueeze(0), weight.shape[0]).squeeze(0)
    num_tokens, width = x.shape
    num_tiles = -(-num_tokens // TILE_SIZE)
    tiles = torch.constant_pad_nd(x, (0, 0, 0, num_tiles * TILE_SIZE - num_tokens)).view(num_tiles, TILE_SIZE, width)
    return torch.bmm(tiles, weight.mT.expand(num_tiles, -1, -1)).flatten(0, 1)[:num_tokens]


def tile_gemm(tiles: torch.Tensor, weights: torch.Tensor, tile_weight_ids: torch.Tensor) -> torch.Tensor:
    """Return ``tiles[i] @ weights[tile_weight_ids[i]].T``: every tile has its own weight matrix (an expert's).

    Rows come out bitwise as `row_gemm` with that matrix would give them.

    Args:
        tiles: [num_tiles, TILE_SIZE, K], fp32.
        weights: [num_weights, N, K], fp32.
        tile_weight_ids: [num_tiles], int64, in [0, num_weights).

    Returns:
        [num_tiles, TILE_SIZE, N], fp32, contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if tiles.dim() != 3 or tiles.shape[1] != TILE_SIZE or weights.dim() != 3 or tiles.shape[2] != weights.shape[2]:
        got = f"{tuple(tiles.shape)} and {tuple(weights.shape)}"
        rule = f"tiles must be [num_tiles, {TILE_SIZE}, K] and weights [num_weights, N, K]"
        raise ValueError(f"tile_gemm: {rule}, got {got}")
    _check_fp32(tiles, weights)
    if tiles.is_cpu:
        return _compiled("gemm_nt", tiles, weights, weights.shape[1], tile_weight_ids.contiguous())
    return torch.bmm(tiles, weights[tile_weight_ids].mT)


def batch_gemm_nt(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b.mT``, every element computed as if it were alone.

    Args:
        a: [batch_size, M, K], fp32.
        b: [batch_size, N, K], fp32, rows contiguous (else the product copies it).

    Returns:
        [batch_size, M, N], fp32, contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check_batches("batch_gemm_nt", a, b, b.dim() == 3 and a.shape[-1] == b.shape[2])
    return _compiled("gemm_nt", a, b, b.shape[1]) if a.is_cpu else torch.bmm(a, b.mT)


def batch_gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b``, every element computed as if it were alone.

    Args:
        a: [batch_size, M, K], fp32.
        b: [batch_size, K, N], fp32, rows contiguous (else the product copies it).

    Returns:
        [batch_size, M, N], fp32, contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check_batches("batch_gemm", a, b, b.dim() == 3 and a.shape[-1] == b.shape[1])
    return _compiled("gemm_nn", a, b, b.shape[2]) if a.is_cpu else torch.bmm(a, b)


def _check_batches(name: str, a: torch.Tensor, b: torch.Tensor, depths_agree: bool) -> None:
    if a.dim() != 3 or not depths_agree or a.shape[0] != b.shape[0]:
        got = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"{name}: a and b must be batches of matrices that can be multiplied, got {got}")
    _check_fp32(a, b)


def _check_fp32(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        raise ValueError(f"row_gemm: both matrices must be fp32, got {a.dtype} and {b.dtype}")


class _Problem(ctypes.Structure):
    """`problem` of row_gemm.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "c", "b_ids")),
        *((name, ctypes.c_int64) for name in ("a_batch", "a_row", "b_batch", "b_row", "m", "n", "k")),
    ]


def _compiled(
    form: str, a: torch.Tensor, b: torch.Tensor, num_columns: int, b_ids: torch.Tensor | None = None
) -> torch.Tensor:
    a = a if a.stride(2) == 1 else a.contiguous()
    b = b if b.stride(2) == 1 else b.contiguous()
    batch_size, num_rows, depth = a.shape
    c = torch.empty(batch_size, num_rows, num_columns)
    problem = _Problem(
        *(a.data_ptr(), b.data_ptr(), c.data_ptr(), None if b_ids is None else b_ids.data_ptr()),
        *(a.stride(0), a.stride(1), b.stride(0), b.stride(1), num_rows, num_columns, depth),
    )
    getattr(_library(), form)(problem, batch_size, torch.get_num_threads())
    return c


@cache
def _library() -> ctypes.CDLL:
    """Raises ImportError: the package was installed without its compiled part."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        if (path := folder / f"_row_gemm{suffix}").exists():
            library = ctypes.CDLL(str(path))  # after torch: shares its OpenMP threads
            for function in (library.gemm_nt, library.gemm_nn):
                function.argtypes = [ctypes.POINTER(_Problem), ctypes.c_int64, ctypes.c_int]
                function.restype = None
            return library
    raise ImportError(f"row_gemm: no compiled _row_gemm in {folder}; install deepinfer-plugin again, with a C compiler")
