"""`rope`: against complex multiplication, by hand, and row by row."""

import math

import pytest
import torch

from deepinfer_plugin.kernels.quant_formats import round_fp8
from deepinfer_plugin.kernels.rope import rope
from deepinfer_plugin.kernels.rope_table import rope_table
from tests.kernels.row_subsets import NUM_ROWS, assert_rows_are_independent

# Two products and a sum: 3 fp32 roundings of values up to the pair's length. bf16: one rounding of that length more.
RTOL = {torch.float32: 2**-22, torch.bfloat16: 2**-8}


def angles_of(num_tokens: int, rope_dim: int) -> torch.Tensor:
    return rope_table(1000, rope_dim, 10000.0, None)[torch.randint(1000, (num_tokens,))]


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_ROWS)
@pytest.mark.parametrize("num_heads, head_dim, rope_dim", [(4, 64, 32), (1, 512, 64), (3, 2, 2), (2, 8, 8)])
def test_equals_a_complex_product(
    num_tokens: int, num_heads: int, head_dim: int, rope_dim: int, dtype: torch.dtype, inverse: bool, device: str
) -> None:
    x = torch.randn(num_tokens, num_heads, head_dim).to(dtype)
    cos_sin = angles_of(num_tokens, rope_dim)
    got = rope(x.to(device), cos_sin.to(device), inverse).cpu()
    assert got.dtype == dtype and got.is_contiguous()
    first, half = head_dim - rope_dim, rope_dim // 2
    pairs = torch.complex(x[..., first::2].double(), x[..., first + 1 :: 2].double())
    turn = torch.complex(cos_sin[:, :half].double(), cos_sin[:, half:].double()).unsqueeze(1)
    want = pairs * (turn.conj() if inverse else turn)
    bound = RTOL[dtype] * pairs.abs() * 1.01
    assert ((got[..., first::2].double() - want.real).abs() <= bound).all()
    assert ((got[..., first + 1 :: 2].double() - want.imag).abs() <= bound).all()
    assert torch.equal(got[..., :first], x[..., :first])


def test_turns_adjacent_pairs_of_the_last_channels(device: str) -> None:
    quarter, half = math.pi / 2, math.pi
    x = torch.tensor([[[9.0, 9.0, 1.0, 2.0, 3.0, 4.0]]], device=device)
    cos_sin = torch.tensor([[math.cos(quarter), math.cos(half), math.sin(quarter), math.sin(half)]], device=device)
    assert rope(x, cos_sin).flatten().tolist() == pytest.approx([9, 9, -2, 1, -3, -4], abs=1e-6)
    assert rope(x, cos_sin, inverse=True).flatten().tolist() == pytest.approx([9, 9, 2, -1, -3, -4], abs=1e-6)


def test_the_inverse_undoes_the_rotation(device: str) -> None:
    x, cos_sin = torch.randn(7, 3, 64, device=device), angles_of(7, 32).to(device)
    torch.testing.assert_close(rope(rope(x, cos_sin), cos_sin, inverse=True), x, rtol=1e-5, atol=1e-6)


def test_takes_strided_input_and_leaves_it_alone(device: str) -> None:
    wide, cos_sin = torch.randn(5, 6, 96, device=device), angles_of(5, 64).to(device)
    x, before = wide[:, ::2, 32:], wide.clone()
    padded = torch.cat([cos_sin, cos_sin], dim=1)[:, :64]
    assert torch.equal(rope(x, padded), rope(x.contiguous(), cos_sin))
    assert torch.equal(wide, before)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("inverse", [False, True])
def test_rows_are_independent(inverse: bool, dtype: torch.dtype, device: str) -> None:
    x, cos_sin = torch.randn(100, 3, 40, device=device).to(dtype), angles_of(100, 10).to(device)
    assert_rows_are_independent(lambda x, cos_sin: rope(x, cos_sin, inverse), x, cos_sin)


@pytest.mark.parametrize(
    "x, cos_sin", [((2, 8), (2, 4)), ((2, 1, 8), (3, 4)), ((2, 1, 8), (2, 3)), ((2, 1, 8), (2, 10))]
)
def test_refuses_shapes(x: tuple[int, ...], cos_sin: tuple[int, ...], device: str) -> None:
    with pytest.raises(ValueError, match="rope: "):
        rope(torch.zeros(x, device=device), torch.zeros(cos_sin, device=device))


def test_refuses_tables_that_are_not_fp32(device: str) -> None:
    with pytest.raises(ValueError, match="rope: cos_sin must be fp32"):
        rope(torch.zeros(2, 1, 8, device=device), torch.zeros(2, 4, device=device, dtype=torch.bfloat16))


@pytest.mark.parametrize("inverse", [True, False])
def test_rounds_to_fp8(inverse: bool, device: str) -> None:
    x, cos_sin = torch.randn(9, 3, 96, device=device).bfloat16(), torch.randn(9, 16, device=device)
    assert torch.equal(rope(x, cos_sin, inverse, True), round_fp8(rope(x, cos_sin, inverse)))
    with pytest.raises(ValueError, match="multiple of 32"):
        rope(x[:, :, :48], cos_sin, inverse, True)
