"""`moe_gate`: against a scalar loop, its ties and biases, and row by row."""

import math

import pytest
import torch

from deepinfer_plugin.kernels.moe_gate import moe_gate
from tests.kernels.row_subsets import NUM_ROWS, assert_rows_are_independent

FACTOR = 1.5  # routed_scaling_factor of V4.1


def route(logits: list[float], bias: list[float], top_k: int) -> tuple[list[int], list[float]]:
    scores = [math.sqrt(logit if logit > 20 else math.log1p(math.exp(logit))) for logit in logits]
    ranked = sorted(range(len(logits)), key=lambda e: (-(scores[e] + bias[e]), e))
    ids = sorted(ranked[:top_k])
    total = sum(scores[e] for e in ids) + 1e-20
    return ids, [scores[e] / total * FACTOR for e in ids]


@pytest.mark.parametrize("num_tokens", NUM_ROWS)
@pytest.mark.parametrize("num_experts, top_k", [(8, 2), (384, 6), (4, 4), (1, 1)])
def test_equals_a_scalar_loop(num_tokens: int, num_experts: int, top_k: int, device: str) -> None:
    logits = 4 * torch.randn(num_tokens, num_experts)
    bias, image_bias = torch.randn(num_experts), torch.randn(num_experts)
    is_image = torch.rand(num_tokens) < 0.5
    ids, weights = moe_gate(*(t.to(device) for t in (logits, bias, image_bias, is_image)), top_k, FACTOR)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32 and ids.shape == weights.shape
    for i in range(num_tokens):
        row_bias = image_bias if is_image[i] else bias
        want_ids, want_weights = route(logits[i].tolist(), row_bias.tolist(), top_k)
        assert ids[i].tolist() == want_ids
        assert weights[i].tolist() == pytest.approx(want_weights, rel=1e-6)  # a dozen fp32 roundings


def test_ties_go_to_the_lower_id(device: str) -> None:
    logits, zero = torch.zeros(3, 384, device=device), torch.zeros(384, device=device)
    logits[1, 300:] = 1.0
    logits[2, 5::7] = 1.0
    ids, weights = moe_gate(logits, zero, zero, None, 6, FACTOR)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [300, 301, 302, 303, 304, 305], [5, 12, 19, 26, 33, 40]]
    assert weights.flatten().tolist() == pytest.approx([FACTOR / 6] * 18)


def test_the_bias_selects_but_does_not_weigh(device: str) -> None:
    logits = torch.tensor([[3.0, 2.0, -5.0, 0.0]], device=device)
    bias = torch.tensor([0.0, 0.0, 100.0, 0.0], device=device)
    ids, weights = moe_gate(logits, bias, bias, None, 2, FACTOR)
    small, large = math.sqrt(math.log1p(math.exp(-5))), math.sqrt(math.log1p(math.exp(3)))
    assert ids.tolist() == [[0, 2]]
    want = [FACTOR * large / (large + small), FACTOR * small / (large + small)]
    assert weights[0].tolist() == pytest.approx(want, rel=1e-6)


def test_image_tokens_take_their_own_bias(device: str) -> None:
    logits = torch.zeros(2, 4, device=device)
    text, image = torch.tensor([1.0, 0, 0, 0], device=device), torch.tensor([0, 0, 0, 1.0], device=device)
    ids, _ = moe_gate(logits, text, image, torch.tensor([False, True], device=device), 1, FACTOR)
    assert ids.tolist() == [[0], [3]]
    assert moe_gate(logits, text, image, None, 1, FACTOR)[0].tolist() == [[0], [0]]


def test_padding_rows_visit_no_expert_and_change_no_other_row(device):
    logits, bias = torch.randn(5, 16, device=device), torch.randn(16, device=device)
    is_padding = torch.tensor([False, True, False, False, True], device=device)
    ids, weights = moe_gate(logits, bias, bias, None, 6, FACTOR, is_padding)
    assert ids[is_padding].eq(16).all() and weights[is_padding].eq(0).all()
    for got, want in zip((ids, weights), moe_gate(logits, bias, bias, None, 6, FACTOR), strict=True):
        assert torch.equal(got[~is_padding], want[~is_padding])


def test_large_logits_do_not_overflow(device: str) -> None:
    zero = torch.zeros(2, device=device)
    _, weights = moe_gate(torch.tensor([[900.0, 100.0]], device=device), zero, zero, None, 2, FACTOR)
    assert weights[0].tolist() == pytest.approx([FACTOR * 30 / 40, FACTOR * 10 / 40], rel=1e-6)


def test_takes_strided_logits(device: str) -> None:
    logits, bias = torch.randn(9, 64, device=device)[:, ::2], torch.randn(32, device=device)
    got, want = (moe_gate(x, bias, bias, None, 3, FACTOR) for x in (logits, logits.contiguous()))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("num_experts, top_k", [(8, 2), (128, 3), (384, 6)])
def test_rows_are_independent(num_experts: int, top_k: int, device: str) -> None:
    bias, image_bias = torch.randn(2, num_experts, device=device)
    logits, is_image = torch.randn(100, num_experts, device=device), torch.rand(100, device=device) < 0.5
    logits[:50] = logits[:50].round()  # many ties
    assert_rows_are_independent(lambda x, i: moe_gate(x, bias, image_bias, i, top_k, FACTOR), logits, is_image)


def test_refuses(device: str) -> None:
    logits, bias = torch.zeros(2, 4, device=device), torch.zeros(4, device=device)
    is_image = torch.zeros(2, dtype=torch.bool, device=device)
    for args in (
        (logits[0], bias, bias, None, 2),
        (logits.bfloat16(), bias, bias, None, 2),
        (logits, bias[:3], bias, None, 2),
        (logits, bias, bias.bfloat16(), None, 2),
        (logits, bias, bias, is_image[:1], 2),
        (logits, bias, bias, is_image.int(), 2),
        (logits, bias, bias, None, 5),
        (logits, bias, bias, None, 0),
    ):
        with pytest.raises(ValueError, match="moe_gate: "):
            moe_gate(*args, FACTOR)
