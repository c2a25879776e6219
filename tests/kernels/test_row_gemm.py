"""`row_gemm`, `tile_gemm` and the batch products: products whose rows do not see each other."""

import pytest
import torch

from deepinfer_plugin.kernels.row_gemm import TILE_SIZE, batch_gemm, batch_gemm_nt, row_gemm, tile_gemm
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


@pytest.mark.parametrize("width", [64, 1000])
def test_tiles_take_their_own_weight(width: int, device: str) -> None:
    weights = torch.randn(4, 24, width, device=device)
    tiles = torch.randn(7, TILE_SIZE, width, device=device)
    ids = torch.tensor([3, 0, 0, 2, 1, 3, 3], device=device)
    for _ in each_thread_count():
        got = tile_gemm(tiles, weights, ids)
        for tile, weight_id, product in zip(tiles, ids.tolist(), got, strict=True):
            assert torch.equal(product, row_gemm(tile, weights[weight_id]))


BATCHES = [(1, 1, 1), (4, 24, 31), (5, 64, 512), (64, 640, 512), (17, 100, 300), (70, 130, 16)]


@pytest.mark.parametrize("rows, columns, depth", BATCHES)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_batch_equals_its_matrices_alone(rows: int, columns: int, depth: int, transposed: bool, device: str) -> None:
    a, b = torch.randn(9, rows, depth, device=device), torch.randn(9, columns, depth, device=device)
    product = (lambda a, b: batch_gemm_nt(a, b)) if transposed else (lambda a, b: batch_gemm(a, b.mT.contiguous()))
    whole = product(a, b)
    assert whole.shape == (9, rows, columns) and whole.is_contiguous()
    for x, w, got in zip(a, b, whole, strict=True):
        assert_close_to_fp64(got, x, w)
    for _ in each_thread_count():
        for part in (slice(3, 4), slice(2, 7), slice(0, 9, 2)):
            assert torch.equal(product(a[part], b[part]), whole[part])


@pytest.mark.parametrize("rows, columns, depth", BATCHES)
def test_an_element_does_not_depend_on_the_others(rows: int, columns: int, depth: int) -> None:
    """Whatever block of registers computes it. Only the compiled kernel promises that."""
    a, b = torch.randn(1, rows, depth), torch.randn(1, columns, depth)
    transposed, plain = batch_gemm_nt(a, b), batch_gemm(a, b.mT.contiguous())
    for row in {0, rows // 2, rows - 1}:
        for column in {0, columns // 2, columns - 1}:
            x, w = a[:, row : row + 1], b[:, column : column + 1]
            assert torch.equal(batch_gemm_nt(x, w)[0, 0, 0], transposed[0, row, column])
            assert torch.equal(batch_gemm(x, w.mT.contiguous())[0, 0, 0], plain[0, row, column])


def test_one_product_is_exact_in_every_lane(device: str) -> None:
    """x @ I = x: no element is lost or read twice, at depths and widths around the lanes'."""
    for size in (1, 2, 15, 16, 17, 33, 64, 65, 100):
        x, eye = torch.randn(1, 5, size, device=device), torch.eye(size, device=device)[None]
        assert torch.equal(batch_gemm(x, eye), x) and torch.equal(batch_gemm_nt(x, eye), x)


def test_a_depth_of_zero_gives_zeros(device: str) -> None:
    empty = torch.zeros(2, 3, 0, device=device)
    assert torch.equal(batch_gemm_nt(empty, empty), torch.zeros(2, 3, 3, device=device))


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
    with pytest.raises(ValueError, match="row_gemm: both matrices must be fp32"):
        row_gemm(x.bfloat16(), x)


@pytest.mark.parametrize(
    "tiles, weights",
    [((1, TILE_SIZE - 1, 8), (2, 24, 8)), ((1, TILE_SIZE, 8), (2, 24, 9)), ((TILE_SIZE, 8), (2, 24, 8))],
)
def test_tile_gemm_refuses(tiles: tuple[int, ...], weights: tuple[int, ...], device: str) -> None:
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="tile_gemm: "):
        tile_gemm(torch.zeros(tiles, device=device), torch.zeros(weights, device=device), ids)


@pytest.mark.parametrize(
    "a, b", [((2, 3, 4), (3, 4, 4)), ((3, 4), (4, 4)), ((2, 3, 4), (2, 5, 6)), ((2, 3, 4), (4, 4))]
)
def test_batch_products_refuse(a: tuple[int, ...], b: tuple[int, ...], device: str) -> None:
    for product in (batch_gemm, batch_gemm_nt):
        with pytest.raises(ValueError, match=f"{product.__name__}: "):
            product(torch.zeros(a, device=device), torch.zeros(b, device=device))
