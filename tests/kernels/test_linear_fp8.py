"""`linear_fp8`: against fp64 on rounded inputs, by hand, and row by row."""

import pytest
import torch

from deepinfer_plugin.kernels.linear_fp8 import linear_fp8
from deepinfer_plugin.kernels.quant_formats import decode_fp8_blocks, encode_fp8_blocks, round_fp8
from tests.kernels.row_subsets import NUM_ROWS, assert_rows_are_independent

DTYPES = [torch.float32, torch.bfloat16]


def fp8_weight(num_columns: int, width: int, device: str) -> torch.Tensor:
    return decode_fp8_blocks(*encode_fp8_blocks(torch.randn(num_columns, width, device=device)))


@pytest.mark.parametrize("round_input", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_ROWS)
def test_equals_the_product_in_fp64(num_tokens: int, dtype: torch.dtype, round_input: bool, device: str) -> None:
    x, weight = torch.randn(num_tokens, 96, device=device).to(dtype), fp8_weight(40, 96, device)
    got = linear_fp8(x, weight, round_input, dtype)
    operand = round_fp8(x).double() if round_input else x.double()
    want = operand @ weight.double().T
    assert got.dtype == dtype and got.is_contiguous()
    # An fp32 sum in any order, then one rounding (half a unit of bf16).
    bound = 96 * 2**-23 * (operand.abs() @ weight.double().abs().T) + 2**-8 * want.abs() * (dtype == torch.bfloat16)
    assert ((got.double() - want).abs() <= bound).all()


def test_rounds_groups_of_32_on_their_own_scales(device: str) -> None:
    x = torch.zeros(1, 64, device=device)
    x[0, 0], x[0, 1], x[0, 32] = 448.0, 0.3, 0.3  # beside 448 the 0.3 keeps 3 bits, alone in its group too: 0.3125
    weight = torch.zeros(2, 64, device=device)
    weight[0, 1] = weight[1, 32] = 1.0
    assert linear_fp8(x, weight, True, torch.float32)[0].tolist() == [0.3125, round_fp8(x)[0, 32].item()]
    assert linear_fp8(x, weight, False, torch.float32)[0].tolist() == [pytest.approx(0.3)] * 2


def test_takes_strided_rows(device: str) -> None:
    x, weight = torch.randn(20, 96, device=device)[:, 16:48], fp8_weight(8, 32, device)
    want = linear_fp8(x.contiguous(), weight, True, torch.float32)
    assert torch.equal(linear_fp8(x, weight, True, torch.float32), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_independent(dtype: torch.dtype, device: str) -> None:
    weight = fp8_weight(48, 128, device)
    x = torch.randn(100, 128, device=device).to(dtype)
    assert_rows_are_independent(lambda x: linear_fp8(x, weight, True, dtype), x)


def test_refuses(device: str) -> None:
    x, weight = torch.zeros(2, 32, device=device), torch.zeros(3, 32, device=device)
    for args in ((x, weight[:, :3]), (x[0], weight), (x, weight.bfloat16()), (x.int(), weight)):
        with pytest.raises(ValueError, match="linear_fp8: "):
            linear_fp8(*args, True, torch.float32)
    with pytest.raises(ValueError, match="multiple of 32"):
        linear_fp8(x[:, :31], weight[:, :31], True, torch.float32)
