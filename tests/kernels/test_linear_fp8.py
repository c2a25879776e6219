"""`linear_fp8`: against fp64 and row by row."""

import pytest
import torch

from deepinfer_plugin.kernels.linear_fp8 import linear_fp8
from deepinfer_plugin.kernels.quant_formats import decode_fp8_blocks, encode_fp8_blocks
from tests.kernels.row_subsets import NUM_ROWS, assert_rows_are_independent

DTYPES = [torch.float32, torch.bfloat16]


def fp8_weight(num_columns: int, width: int, device: str) -> torch.Tensor:
    return decode_fp8_blocks(*encode_fp8_blocks(torch.randn(num_columns, width, device=device)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_ROWS)
def test_equals_the_product_in_fp64(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    x, weight = torch.randn(num_tokens, 96, device=device).to(dtype), fp8_weight(40, 96, device)
    got = linear_fp8(x, weight, dtype)
    want = x.double() @ weight.double().T
    assert got.dtype == dtype and got.is_contiguous()
    # An fp32 sum in any order, then one rounding (half a unit of bf16).
    bound = 96 * 2**-23 * (x.double().abs() @ weight.double().abs().T) + 2**-8 * want.abs() * (dtype == torch.bfloat16)
    assert ((got.double() - want).abs() <= bound).all()


def test_takes_strided_rows(device: str) -> None:
    x, weight = torch.randn(20, 96, device=device)[:, 16:48], fp8_weight(8, 32, device)
    want = linear_fp8(x.contiguous(), weight, torch.float32)
    assert torch.equal(linear_fp8(x, weight, torch.float32), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_independent(dtype: torch.dtype, device: str) -> None:
    weight = fp8_weight(48, 128, device)
    x = torch.randn(100, 128, device=device).to(dtype)
    assert_rows_are_independent(lambda x: linear_fp8(x, weight, dtype), x)


def test_refuses(device: str) -> None:
    x, weight = torch.zeros(2, 32, device=device), torch.zeros(3, 32, device=device)
    for args in ((x, weight[:, :3]), (x[0], weight), (x, weight.bfloat16()), (x.int(), weight)):
        with pytest.raises(ValueError, match="linear_fp8: "):
            linear_fp8(*args, torch.float32)
