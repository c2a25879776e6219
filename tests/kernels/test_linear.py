"""`linear`: against fp64, by hand, and row by row."""

import pytest
import torch

from deepinfer_plugin.kernels.linear import linear
from tests.kernels.row_subsets import NUM_ROWS, assert_rows_are_independent

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_ROWS)
@pytest.mark.parametrize("width, num_columns", [(128, 8), (33, 70)])
def test_equals_the_product_in_fp64(
    num_tokens: int, width: int, num_columns: int, dtype: torch.dtype, out_dtype: torch.dtype, device: str
) -> None:
    x = torch.randn(num_tokens, width, device=device).to(dtype)
    weight = torch.randn(num_columns, width, device=device).to(dtype)
    got = linear(x, weight, out_dtype)
    want = x.double() @ weight.double().T
    assert got.dtype == out_dtype and got.is_contiguous()
    # An fp32 sum in any order, then one rounding (half a unit of bf16).
    bound = width * 2**-23 * (x.abs().double() @ weight.abs().double().T)
    bound += 2**-8 * want.abs() * (out_dtype == torch.bfloat16)
    assert ((got.double() - want).abs() <= bound).all()


def test_does_not_round_the_input(device: str) -> None:
    x = torch.tensor([[1 + 2**-20, -1.0]], device=device)
    assert linear(x, torch.ones(1, 2, device=device), torch.float32).item() == 2**-20


def test_rounds_once_at_the_end(device: str) -> None:
    x = torch.tensor([[256.0, 1.0, 1.0]], device=device).bfloat16()  # 256 + 1 would round to 256 in bf16
    assert linear(x, torch.ones(1, 3, device=device).bfloat16(), torch.bfloat16).item() == 258.0


def test_takes_strided_rows(device: str) -> None:
    x, weight = torch.randn(20, 64, device=device)[:, 16:48], torch.randn(8, 32, device=device)
    assert torch.equal(linear(x, weight, torch.float32), linear(x.contiguous(), weight, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_independent(dtype: torch.dtype, device: str) -> None:
    weight = torch.randn(48, 128, device=device).to(dtype)
    x = torch.randn(100, 128, device=device).to(dtype)
    assert_rows_are_independent(lambda x: linear(x, weight, torch.float32), x)


def test_refuses(device: str) -> None:
    x, weight = torch.zeros(2, 4, device=device), torch.zeros(3, 4, device=device)
    for args in ((x, weight[:, :3], torch.float32), (x[0], weight, torch.float32), (x, weight, torch.int8)):
        with pytest.raises(ValueError, match="linear: "):
            linear(*args)
    with pytest.raises(ValueError, match="linear: x, weight and out_dtype must be floating point"):
        linear(x.int(), weight, torch.float32)
