"""`rms_norm`: against fp64, by hand, and row by row."""

import pytest
import torch

from deepinfer_plugin.kernels.quant_formats import round_fp8
from deepinfer_plugin.kernels.rms_norm import rms_norm
from tests.kernels.row_subsets import NUM_ROWS, assert_rows_are_independent

EPS = 1e-20
RTOL = {torch.float32: 1e-5, torch.bfloat16: 2**-8}  # bf16: one rounding, half a unit in the last place


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_ROWS)
@pytest.mark.parametrize("hidden_size", [1, 128, 1000])
def test_equals_the_formula_in_fp64(num_tokens: int, hidden_size: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(num_tokens, hidden_size, device=device).to(dtype)
    weight = torch.randn(hidden_size, device=device).to(dtype)
    wide = x.double()
    want = wide / ((wide * wide).sum(-1, keepdim=True) / hidden_size + EPS).sqrt() * weight.double()
    got = rms_norm(x, weight, EPS)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=RTOL[dtype] * 1.01, atol=0)  # 1 %: fp32 before the rounding


def test_by_hand_with_an_eps_that_counts(device: str) -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], device=device)  # mean square 12.5, plus 12.5: the root is 5
    got = rms_norm(x, torch.tensor([1.0, 10.0], device=device), 12.5)
    assert got.flatten().tolist() == pytest.approx([0.6, 8.0, 0.0, 0.0], rel=1e-6)


def test_a_row_of_zeros_stays_zero(device: str) -> None:
    assert not rms_norm(torch.zeros(2, 8, device=device), torch.ones(8, device=device), EPS).any()


def test_takes_leading_dimensions_and_strides(device: str) -> None:
    wide, weight = torch.randn(5, 3, 64, device=device), torch.randn(32, device=device)
    x = wide[:, 1:, 16:48]
    want = torch.stack([rms_norm(x[:, i].contiguous(), weight, EPS) for i in range(2)], dim=1)
    assert torch.equal(rms_norm(x, weight, EPS), want)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("hidden_size", [64, 1000, 5120])
def test_rows_are_independent(hidden_size: int, dtype: torch.dtype, device: str) -> None:
    weight = torch.randn(hidden_size, device=device).to(dtype)
    x = torch.randn(100, hidden_size, device=device).to(dtype)
    assert_rows_are_independent(lambda x: rms_norm(x, weight, EPS), x)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_rounds_to_fp8(dtype: torch.dtype, device: str) -> None:
    x, weight = torch.randn(9, 96, device=device).to(dtype), torch.randn(96, device=device).to(dtype)
    assert torch.equal(rms_norm(x, weight, EPS, True), round_fp8(rms_norm(x, weight, EPS)))
    with pytest.raises(ValueError, match="multiple of 32"):
        rms_norm(x[:, :33], weight[:33], EPS, True)


@pytest.mark.parametrize("shape, width, eps", [((2, 4), 3, EPS), ((), 1, EPS), ((2, 4), 4, 0.0)])
def test_refuses(shape: tuple[int, ...], width: int, eps: float, device: str) -> None:
    with pytest.raises(ValueError, match="rms_norm: "):
        rms_norm(torch.zeros(shape, device=device), torch.zeros(width, device=device), eps)
