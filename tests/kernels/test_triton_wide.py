"""Weights that are decoded once for many tokens: the bits of the products that decode as they go."""

import pytest
import torch

from deepinfer_plugin.kernels.grouped_linear import grouped_linear
from deepinfer_plugin.kernels.linear_fp8 import linear_fp8
from deepinfer_plugin.kernels.moe_experts import moe_experts
from tests.kernels.test_packed_weights import fp4_experts, fp8_weight, routes

OPS = ["linear_fp8", "grouped_linear", "moe_experts"]
TRITON_ONLY = True


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products with decoded weights there were; from now on two tokens are enough for them."""
    from deepinfer_plugin.kernels import triton_matmul, triton_wide
    from deepinfer_plugin.kernels.moe_experts import triton_nvidia as experts

    seen = []
    for module in (triton_matmul, experts):
        product = module._wide_product

        def counted(*args, product=product):
            seen.append(1)
            return product(*args)

        monkeypatch.setattr(module, "_wide_product", counted)
    monkeypatch.setattr(triton_wide, "MIN_TOKENS", 2)
    return seen


@pytest.mark.parametrize("fp4", [False, True])
def test_decoding_is_exact(fp4: bool, device: str) -> None:
    from deepinfer_plugin.kernels.triton_wide import decode

    weight = fp4_experts(3, 40, 640, device) if fp4 else fp8_weight(100, 640, device)
    assert torch.equal(decode(weight).float(), weight.decoded())


@pytest.mark.parametrize("n, k, num_tokens", [(40, 128, 2), (40, 128, 300), (300, 1280, 5)])
def test_fp8(n: int, k: int, num_tokens: int, wide: list[int], device: str) -> None:
    x, weight = torch.randn(num_tokens, k, device=device).bfloat16(), fp8_weight(n, k, device)
    got = linear_fp8(x, weight, torch.float32)
    assert len(wide) == 1
    for row in {0, 1, num_tokens // 2, num_tokens - 1}:
        assert torch.equal(got[row], linear_fp8(x[row : row + 1], weight, torch.float32)[0])
    assert len(wide) == 1


def test_groups_rounded(wide: list[int], device: str) -> None:
    x, weight = torch.randn(7, 2, 640, device=device).bfloat16(), fp8_weight(2 * 96, 640, device)
    got = grouped_linear(x, weight, torch.bfloat16, True)
    assert len(wide) == 1
    assert torch.equal(got, torch.cat([grouped_linear(row, weight, torch.bfloat16, True) for row in x.split(1)]))


@pytest.mark.parametrize("start", [0, 3])
def test_experts(start: int, wide: list[int], device: str) -> None:
    w13, w2 = fp4_experts(4, 2 * 128, 256, device), fp4_experts(4, 256, 128, device)
    x, (ids, weights) = torch.randn(20, 256, device=device).bfloat16(), routes(20, 2, 6, device)
    args = start, 10.0, True
    got = moe_experts(x, w13, w2, ids, weights, *args)
    assert len(wide) == 2
    rows = zip(x.split(1), ids.split(1), weights.split(1), strict=True)
    assert torch.equal(got, torch.cat([moe_experts(a, w13, w2, b, c, *args) for a, b, c in rows]))
    assert len(wide) == 2


def test_a_tail_is_not_decoded(wide: list[int], device: str) -> None:
    """Its groups are summed in another order."""
    linear_fp8(torch.randn(40, 160, device=device).bfloat16(), fp8_weight(40, 160, device), torch.float32)
    assert not wide
