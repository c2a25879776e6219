"""`row_gemm` and `tile_gemm`: products whose rows do not see each other."""

import pytest
import torch

from deepinfer_plugin.kernels import row_gemm as module
from deepinfer_plugin.kernels.row_gemm import TILE_SIZE, row_gemm, tile_gemm
from tests.kernels.row_subsets import NUM_ROWS, assert_rows_are_independent, each_thread_count


def assert_close_to_fp64(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Any order of an fp32 sum of K products is within K * 2**-24 of the sum of their magnitudes, to first order."""
    bound = x.shape[-1] * 2**-23 * (x.abs() @ weight.abs().mT).double() + 1e-30
    assert ((got.double() - x.double() @ weight.double().mT).abs() <= bound).all()


@pytest.mark.parametrize("num_tokens", NUM_ROWS)
@pytest.mark.parametrize("width, num_columns", [(1, 1), (32, 24), (128, 64), (100, 37), (2048, 130)])
def test_equals_the_product_in_fp64(num_tokens: int, width: int, num_columns: int, device: str) -> None:
    x, weight = torch.randn(num_tokens, width, device=device), torch.randn(num_columns, width, device=device)
    got = row_gemm(x, weight)
    assert got.shape == (num_tokens, num_columns) and got.dtype == torch.float32 and got.is_contiguous()
    assert_close_to_fp64(got, x, weight)


def test_multiplies_small_integers_exactly(device: str) -> None:
    x, weight = (
        torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device),
        torch.tensor([[1.0, 0.0], [5.0, 6.0]], device=device),
    )
    assert row_gemm(x, weight).tolist() == [[1.0, 17.0], [3.0, 39.0]]


@pytest.mark.parametrize(
    "width, num_columns",
    [
        (32, 24),
        (128, 384),
        (512, 24),
        (100, 37),
        (5120, 24),
        (64, 1),
        (31, 2),
        (384, 4),
        (384, 512),
        (512, 9),
        (2048, 512),
    ],
)
def test_rows_are_independent(width: int, num_columns: int, device: str) -> None:
    weight = torch.randn(num_columns, width, device=device)
    assert_rows_are_independent(lambda x: row_gemm(x, weight), torch.randn(100, width, device=device))


def test_takes_strided_rows(device: str) -> None:
    wide, weight = torch.randn(32, 96, device=device), torch.randn(8, 32, device=device)
    for x in (wide[:, 32:64], wide[::2, :32], wide[:17, 64:]):
        assert torch.equal(row_gemm(x, weight), row_gemm(x.contiguous(), weight))


@pytest.mark.parametrize("gathered_tiles", [0, 1, 3, 100])
@pytest.mark.parametrize("width", [64, 1024])
def test_tiles_take_their_own_weight_however_it_is_gathered(
    width: int, gathered_tiles: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    weights = torch.randn(4, 24, width, device=device)
    tiles = torch.randn(7, TILE_SIZE, width, device=device)
    ids = torch.tensor([3, 0, 0, 2, 1, 3, 3], device=device)
    monkeypatch.setattr(module, "MAX_GATHER_BYTES", gathered_tiles * weights[0].numel() * 4)
    for _ in each_thread_count():
        got = tile_gemm(tiles, weights, ids)
        for tile, weight_id, product in zip(tiles, ids.tolist(), got, strict=True):
            assert torch.equal(product, row_gemm(tile, weights[weight_id]))


def test_no_tiles_give_an_empty_product(device: str) -> None:
    empty = torch.zeros(0, TILE_SIZE, 8, device=device)
    ids = torch.zeros(0, dtype=torch.int64, device=device)
    assert tile_gemm(empty, torch.zeros(2, 24, 8, device=device), ids).shape == (0, TILE_SIZE, 24)


@pytest.mark.parametrize("x, weight", [((2, 3), (4, 5)), ((2,), (4, 2)), ((1, 2, 3), (4, 3))])
def test_row_gemm_refuses_shapes(x: tuple[int, ...], weight: tuple[int, ...], device: str) -> None:
    with pytest.raises(ValueError, match="row_gemm: "):
        row_gemm(torch.zeros(x, device=device), torch.zeros(weight, device=device))


def test_row_gemm_refuses_other_dtypes(device: str) -> None:
    x = torch.zeros(2, 3, device=device)
    with pytest.raises(ValueError, match="row_gemm: x and weight must be fp32"):
        row_gemm(x.bfloat16(), x)


@pytest.mark.parametrize(
    "tiles, weights",
    [((1, 15, 8), (2, 24, 8)), ((1, 16, 8), (2, 24, 9)), ((16, 8), (2, 24, 8)), ((1, 16, 8), (2, 15, 8))],
)
def test_tile_gemm_refuses(tiles: tuple[int, ...], weights: tuple[int, ...], device: str) -> None:
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="tile_gemm: "):
        tile_gemm(torch.zeros(tiles, device=device), torch.zeros(weights, device=device), ids)
