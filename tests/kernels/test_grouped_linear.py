"""`grouped_linear`: against float64, its grouping, row invariance, and what it refuses."""

import pytest
import torch

from deepinfer_plugin.kernels.grouped_linear import grouped_linear
from deepinfer_plugin.kernels.quant_formats import round_fp8

# K = 96 products summed in fp32: each of the 96 roundings is at most 2**-24 of the partial sums' magnitude
RTOL = {torch.float32: 96 * 2**-24, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("num_groups", [1, 2, 8])
def test_equals_float64(num_tokens: int, num_groups: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(num_tokens, num_groups, 96, device=device)
    weight = torch.randn(num_groups, 40, 96, device=device)
    want = torch.einsum("tgk,gnk->tgn", x.double(), weight.double())
    magnitude = torch.einsum("tgk,gnk->tgn", x.double().abs(), weight.double().abs())
    got = grouped_linear(x, weight, dtype)
    assert got.dtype == dtype
    assert bool(((got.double() - want).abs() <= RTOL[dtype] * magnitude).all())


def test_each_group_has_its_own_matrix(device: str) -> None:
    x = torch.ones(1, 2, 1, device=device)
    weight = torch.tensor([[[2.0]], [[3.0]]], device=device)
    assert grouped_linear(x, weight, torch.float32).tolist() == [[[2.0], [3.0]]]


def test_a_row_does_not_depend_on_its_batch(device: str) -> None:
    x, weight = torch.randn(100, 2, 128, device=device), torch.randn(2, 32, 128, device=device)
    full = grouped_linear(x, weight, torch.float32)
    for size in (1, 2, 15, 16, 17, 64):
        rows = torch.randperm(100, device=device)[:size]
        assert torch.equal(grouped_linear(x[rows], weight, torch.float32), full[rows])


def test_takes_rows_of_a_wider_tensor(device: str) -> None:
    wide, weight = torch.randn(5, 2, 64, device=device), torch.randn(2, 8, 32, device=device)
    rows = wide[:, :, :32]
    got = grouped_linear(rows, weight, torch.float32)
    assert torch.equal(got, grouped_linear(rows.contiguous(), weight, torch.float32))


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_rounds_the_result_to_fp8(num_tokens: int, device: str) -> None:
    x, weight = torch.randn(num_tokens, 2, 64, device=device), torch.randn(2, 96, 64, device=device)
    got = grouped_linear(x, weight, torch.bfloat16, True)
    assert torch.equal(got, round_fp8(grouped_linear(x, weight, torch.bfloat16)))
    with pytest.raises(ValueError, match="N must be a multiple of 32"):
        grouped_linear(x, weight[:, :40], torch.bfloat16, True)


@pytest.mark.parametrize("shapes", [((4, 2, 8), (3, 5, 8)), ((4, 2, 8), (2, 5, 7)), ((4, 8), (2, 5, 8))])
def test_refuses(shapes: tuple[tuple[int, ...], tuple[int, ...]], device: str) -> None:
    with pytest.raises(ValueError, match="grouped_linear: "):
        grouped_linear(torch.zeros(shapes[0], device=device), torch.zeros(shapes[1], device=device), torch.float32)
