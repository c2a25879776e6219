"""The round trips as ops: bit by bit the definitions of `quant_formats`, which have tests of their own."""

import pytest
import torch

from deepinfer_plugin.kernels import fake_quant, quant_formats
from tests.kernels.row_subsets import assert_rows_are_independent

NAMES = ["round_fp8", "round_fp4_index", "round_fp4_kv"]


def all_magnitudes(num_rows: int, width: int, device: str) -> torch.Tensor:
    """Groups of every binade that fp32 can scale, zeros of both signs, values on and beside the midpoints."""
    binades = torch.linspace(-120, 100, num_rows * width // 16, device=device).view(num_rows, -1)
    rows = torch.randn(num_rows, width, device=device)
    rows[:, ::5] = rows[:, ::5].sign() * (torch.randint(0, 64, rows[:, ::5].shape, device=device) / 16)
    return rows * torch.exp2(binades.round().repeat_interleave(16, 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (7, 96), (50, 512), (3, 5, 64)])
def test_equals_the_definition(name: str, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    x = all_magnitudes(max(1, torch.tensor(shape[:-1]).prod().item()), shape[-1], device).to(dtype)
    x = x[: torch.tensor(shape[:-1]).prod()].view(shape)
    got, want = getattr(fake_quant, name)(x), getattr(quant_formats, name)(x)
    assert got.dtype == dtype and got.shape == shape
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))  # the bits: -0.0 is not 0.0


@pytest.mark.parametrize("name", NAMES)
def test_takes_strided_rows(name: str, device: str) -> None:
    x = torch.randn(6, 4, 96, device=device)[:, 1:3, 16:48]
    assert torch.equal(getattr(fake_quant, name)(x), getattr(fake_quant, name)(x.contiguous()))


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_independent(name: str, device: str) -> None:
    assert_rows_are_independent(getattr(fake_quant, name), torch.randn(100, 64, device=device))


@pytest.mark.parametrize("name", NAMES)
def test_refuses(name: str, device: str) -> None:
    for x in (torch.zeros(2, 40, device=device), torch.zeros((), device=device)):
        with pytest.raises(ValueError, match=f"{name}: the last dimension must be a multiple of"):
            getattr(fake_quant, name)(x)
