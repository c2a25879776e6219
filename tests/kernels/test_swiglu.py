"""`swiglu`: against fp64, its clamps and its route weight, and row by row."""

import pytest
import torch

from deepinfer_plugin.kernels.quant_formats import round_fp8
from deepinfer_plugin.kernels.swiglu import swiglu
from tests.kernels.row_subsets import NUM_ROWS, assert_rows_are_independent

LIMIT = 10.0  # swiglu_limit of V4.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", NUM_ROWS)
@pytest.mark.parametrize("width", [1, 64, 300])
def test_equals_the_formula_in_fp64(num_tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    gate_up = (8 * torch.randn(num_tokens, 2 * width, device=device)).to(dtype)  # a fifth lies past the limit
    route_weights = torch.rand(num_tokens, device=device)
    gate, up = gate_up.double().clamp(max=LIMIT).split(width, dim=1)
    up = gate_up.double()[:, width:].clamp(-LIMIT, LIMIT)
    want = gate * torch.sigmoid(gate) * up
    # fp32 throughout, whatever the input: five roundings, exp's last bits, and what it makes of its rounded argument
    error = 2**-24 * (5 + 4 + 2 * gate.abs())
    for weights, expected in ((None, want), (route_weights, want * route_weights.double()[:, None])):
        got = swiglu(gate_up, LIMIT, weights)
        assert got.dtype == torch.float32 and got.is_contiguous()
        assert ((got.double() - expected).abs() <= error * expected.abs() + 1e-30).all()


def test_clamps_the_gate_from_above_only(device: str) -> None:
    gate_up = torch.tensor([[100.0, -100.0, 100.0, 100.0]], device=device)  # gates 100, -100; ups 100, 100
    silu_of_limit = LIMIT / (1 + torch.tensor(-LIMIT).exp().item())
    assert swiglu(gate_up, LIMIT)[0].tolist() == pytest.approx([silu_of_limit * LIMIT, 0.0], rel=1e-5, abs=1e-30)


def test_clamps_up_on_both_sides(device: str) -> None:
    gate_up = torch.tensor([[1.0, 1.0, 100.0, -100.0]], device=device)
    silu_of_one = 1 / (1 + torch.tensor(-1.0).exp().item())
    assert swiglu(gate_up, LIMIT)[0].tolist() == pytest.approx([silu_of_one * LIMIT, -silu_of_one * LIMIT], rel=1e-5)


def test_takes_rows_of_a_wider_tensor(device: str) -> None:
    rows = torch.randn(5, 64, device=device)[:, :32]
    assert torch.equal(swiglu(rows, LIMIT), swiglu(rows.contiguous(), LIMIT))


@pytest.mark.parametrize("weighted", [False, True])
def test_rounds_to_fp8(weighted: bool, device: str) -> None:
    gate_up, weights = torch.randn(9, 2 * 96, device=device), torch.rand(9, device=device) if weighted else None
    got = swiglu(gate_up, LIMIT, weights, True)
    assert got.dtype == torch.bfloat16 and torch.equal(got.float(), round_fp8(swiglu(gate_up, LIMIT, weights)))
    with pytest.raises(ValueError, match="multiple of 32"):
        swiglu(gate_up[:, :66], LIMIT, None, True)


@pytest.mark.parametrize("width", [1, 7, 64])
def test_rows_are_independent(width: int, device: str) -> None:
    gate_up, route_weights = torch.randn(100, 2 * width, device=device), torch.rand(100, device=device)
    assert_rows_are_independent(lambda x, w: swiglu(x, LIMIT, w), gate_up, route_weights)


@pytest.mark.parametrize("shape, limit", [((2, 3), LIMIT), ((4,), LIMIT), ((2, 4), 0.0)])
def test_refuses(shape: tuple[int, ...], limit: float, device: str) -> None:
    with pytest.raises(ValueError, match="swiglu: "):
        swiglu(torch.zeros(shape, device=device), limit)


def test_refuses_strided_rows_and_wrong_route_weights(device: str) -> None:
    x = torch.zeros(2, 4, device=device)
    with pytest.raises(ValueError, match="contiguous rows"):
        swiglu(x[:, ::2], LIMIT)
    for weights in (
        torch.zeros(3, device=device),
        torch.zeros(2, 1, device=device),
        torch.zeros(2, device=device).bfloat16(),
    ):
        with pytest.raises(ValueError, match="swiglu: route_weights"):
            swiglu(x, LIMIT, weights)
