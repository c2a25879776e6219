"""`moe_experts`: against a loop over tokens and experts, expert-parallel shards, and row by row."""

import pytest
import torch

from deepinfer_plugin.kernels.moe_experts import moe_experts
from deepinfer_plugin.kernels.quant_formats import round_fp8
from deepinfer_plugin.kernels.row_gemm import row_gemm
from deepinfer_plugin.kernels.swiglu import swiglu
from tests.kernels.row_subsets import NUM_ROWS, assert_rows_are_independent

DECODED_ONLY = True  # test_packed_weights.py has the packed ones
LIMIT = 10.0
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 8, 64, 32


def random_experts(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    w13 = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, device=device) / 4
    return w13, torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, device=device) / 4


def random_routes(num_tokens: int, top_k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.rand(num_tokens, NUM_EXPERTS, device=device).argsort(dim=1)[:, :top_k].sort(dim=1).values
    return ids, torch.rand(num_tokens, top_k, device=device)


def by_token(x, w13, w2, ids, weights, round_activation: bool, local: range = range(NUM_EXPERTS)) -> torch.Tensor:
    """One token and one expert at a time, with the same row products: equal bit by bit."""
    round_or_not = round_fp8 if round_activation else (lambda t: t)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for i in range(len(x)):
        for e, weight in zip(ids[i].tolist(), weights[i], strict=True):
            if e in local:
                gate_up = row_gemm(x[i : i + 1].float(), w13[e])
                activation = round_or_not(swiglu(gate_up, LIMIT, weight.view(1)))
                out[i] += row_gemm(activation, w2[e])[0]
    return out


@pytest.mark.parametrize("round_activation", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", NUM_ROWS)
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_equals_a_loop_over_tokens(
    num_tokens: int, top_k: int, dtype: torch.dtype, round_activation: bool, device: str
) -> None:
    x = torch.randn(num_tokens, HIDDEN, device=device).to(dtype)
    w13, w2 = random_experts(device)
    ids, weights = random_routes(num_tokens, top_k, device)
    got = moe_experts(x, w13, w2, ids, weights, 0, LIMIT, round_activation)
    assert got.dtype == torch.float32 and got.shape == x.shape
    assert torch.equal(got, by_token(x, w13, w2, ids, weights, round_activation))


def test_equals_the_formula_in_fp64(device: str) -> None:
    x, (w13, w2), (ids, weights) = (
        torch.randn(20, HIDDEN, device=device),
        random_experts(device),
        random_routes(20, 3, device),
    )
    got = moe_experts(x, w13, w2, ids, weights, 0, LIMIT, False)
    gate, up = torch.einsum("td,eid->tei", x.double(), w13.double()).chunk(2, dim=-1)
    each = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
    each = torch.einsum("tei,edi->ted", each, w2.double())
    share = torch.zeros(20, NUM_EXPERTS, dtype=torch.float64, device=device).scatter_(1, ids, weights.double())
    # Values of order 30 from fp32 sums of 64 and 32 products: a few hundred units of 2**-24.
    torch.testing.assert_close(got.double(), (each * share[..., None]).sum(1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_tokens", NUM_ROWS)
@pytest.mark.parametrize("start, stop", [(0, 3), (3, 8), (7, 8), (0, 0)])
def test_experts_of_other_ranks_contribute_nothing(num_tokens: int, start: int, stop: int, device: str) -> None:
    x, (w13, w2) = torch.randn(num_tokens, HIDDEN, device=device), random_experts(device)
    ids, weights = random_routes(num_tokens, 3, device)
    got = moe_experts(x, w13[start:stop], w2[start:stop], ids, weights, start, LIMIT, True)
    assert torch.equal(got, by_token(x, w13, w2, ids, weights, True, range(start, stop)))


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_rows_without_experts_are_zero(num_tokens: int, device: str) -> None:
    x, (w13, w2) = torch.full((num_tokens, HIDDEN), torch.nan, device=device), random_experts(device)
    ids = torch.full((num_tokens, 2), -1, device=device)
    assert not moe_experts(x, w13, w2, ids, torch.zeros(num_tokens, 2, device=device), 0, LIMIT, True).any()


def test_all_tokens_on_one_expert(device: str) -> None:
    x, (w13, w2) = torch.randn(50, HIDDEN, device=device), random_experts(device)
    ids, weights = torch.full((50, 1), 5, device=device), torch.rand(50, 1, device=device)
    got = moe_experts(x, w13, w2, ids, weights, 0, LIMIT, True)
    assert torch.equal(got, by_token(x, w13, w2, ids, weights, True))


def test_the_route_weight_is_applied_before_the_rounding(device: str) -> None:
    x, (w13, w2) = torch.randn(4, HIDDEN, device=device), random_experts(device)
    ids = torch.arange(4, device=device).view(4, 1)
    one, third = torch.ones(4, 1, device=device), torch.full((4, 1), 1 / 3, device=device)
    scaled_after = moe_experts(x, w13, w2, ids, one, 0, LIMIT, True) / 3
    assert not torch.equal(moe_experts(x, w13, w2, ids, third, 0, LIMIT, True), scaled_after)


def test_takes_strided_rows(device: str) -> None:
    x, (w13, w2) = torch.randn(20, 2 * HIDDEN, device=device)[:, HIDDEN:], random_experts(device)
    ids, weights = random_routes(20, 2, device)
    got, want = (moe_experts(rows, w13, w2, ids, weights, 0, LIMIT, True) for rows in (x, x.contiguous()))
    assert torch.equal(got, want)


@pytest.mark.parametrize("start, stop", [(0, 8), (2, 6)])
def test_rows_are_independent(start: int, stop: int, device: str) -> None:
    x, (w13, w2) = torch.randn(100, HIDDEN, device=device), random_experts(device)
    ids, weights = random_routes(100, 2, device)
    w13, w2 = w13[start:stop], w2[start:stop]
    assert_rows_are_independent(
        lambda x, ids, weights: moe_experts(x, w13, w2, ids, weights, start, LIMIT, True), x, ids, weights
    )


def test_refuses(device: str) -> None:
    x, (w13, w2) = torch.zeros(2, HIDDEN, device=device), random_experts(device)
    ids, weights = random_routes(2, 2, device)
    for args in (
        (x[0], w13, w2, ids, weights, LIMIT),
        (x[:, 1:], w13, w2, ids, weights, LIMIT),
        (x, w13[:, 2:], w2, ids, weights, LIMIT),
        (x, w13[1:], w2, ids, weights, LIMIT),
        (x, w13, w2, ids[:1], weights[:1], LIMIT),
        (x, w13, w2, ids, weights[:, :1], LIMIT),
        (x, w13, w2, ids.int(), weights, LIMIT),
        (x, w13.bfloat16(), w2, ids, weights, LIMIT),
        (x, w13, w2, ids, weights, 0.0),
    ):
        with pytest.raises(ValueError, match="moe_experts: "):
            moe_experts(*args[:5], 0, args[5], True)
