"""`compress_kv`: against float64 written another way, its rounding points, and what it refuses."""

import math

import pytest
import torch

from deepinfer_plugin.kernels.compress_kv import compress_kv

EPS = 1e-20
# fp32: sums of 512 squares, a softmax and a norm, each a few units of 2**-24. bf16: the pooled value is rounded before
# the norm and the latent after it, and both may fall to the other side: two units in the last place.
RTOL = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


def inputs(num_tokens: int, head_dim: int, device: str) -> tuple[torch.Tensor, ...]:
    value, score = torch.randn(2, num_tokens, head_dim, device=device)
    previous = torch.randn(num_tokens, 2 * head_dim, device=device)
    return value, 3 * score, previous, 1 + 0.1 * torch.randn(head_dim, device=device)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64])
@pytest.mark.parametrize("head_dim", [5, 64, 512])
def test_equals_sigmoid_of_the_score_difference(
    num_tokens: int, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    value, score, previous, weight = inputs(num_tokens, head_dim, device)
    share = torch.sigmoid(score.double() - previous[:, head_dim:].double())
    pooled = share * value.double() + (1 - share) * previous[:, :head_dim].double()
    got = compress_kv(value, score, previous, weight, EPS, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), norm(pooled.to(dtype), weight), rtol=RTOL[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_ratio_one_rounds_then_norms(dtype: torch.dtype, device: str) -> None:
    value, _, _, weight = inputs(9, 64, device)
    got = compress_kv(value, None, None, weight, EPS, dtype)
    # the value is rounded on both sides: what is left is the latent's own rounding
    torch.testing.assert_close(got.double(), norm(value.to(dtype), weight), rtol=RTOL[dtype] / 2, atol=1e-6)


def test_equal_scores_average_and_a_far_higher_score_wins(device: str) -> None:
    value = torch.tensor([[4.0, 2.0]], device=device)
    score = torch.tensor([[1.0, -200.0]], device=device)
    previous = torch.tensor([[0.0, 6.0, 1.0, 50.0]], device=device)  # pooled: (4 + 0) / 2 and 6
    root = math.sqrt((2.0**2 + 6.0**2) / 2)
    got = compress_kv(value, score, previous, torch.ones(2, device=device), EPS, torch.float32)
    assert got.tolist()[0] == pytest.approx([2 / root, 6 / root], rel=1e-6)


def test_the_pooled_value_is_rounded_before_the_norm(device: str) -> None:
    value = torch.tensor([[1.0 + 2**-10, 1.0]], device=device)  # in bf16 both are 1, and the norm leaves them equal
    got = compress_kv(value, None, None, torch.ones(2, device=device), EPS, torch.bfloat16)
    assert got.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("head_dim", [20, 64, 512])
@pytest.mark.parametrize("ratio", [1, 2])
def test_a_row_does_not_depend_on_the_others(ratio: int, head_dim: int, device: str) -> None:
    value, score, previous, weight = inputs(67, head_dim, device)

    def run(rows: torch.Tensor) -> torch.Tensor:
        pair = (score[rows], previous[rows]) if ratio == 2 else (None, None)
        return compress_kv(value[rows], *pair, weight, EPS, torch.float32)

    every_row = torch.arange(67, device=device)
    whole = run(every_row)
    for rows in (every_row[5:6], every_row[66:], every_row[::3], torch.randperm(67, device=device), every_row[:17]):
        assert torch.equal(run(rows), whole[rows])


def test_takes_rows_of_wider_tensors(device: str) -> None:
    value, score, previous, weight = inputs(5, 64, device)
    both = torch.cat((value, score), dim=1)
    wide = torch.cat((previous, previous), dim=1)[:, :128]
    got = compress_kv(both[:, :64], both[:, 64:], wide, weight, EPS, torch.bfloat16)
    assert torch.equal(got, compress_kv(value, score, previous, weight, EPS, torch.bfloat16))


def test_refuses(device: str) -> None:
    value, score, previous, weight = inputs(3, 8, device)
    for bad in (
        (value[0], score, previous, weight),
        (value.bfloat16(), score, previous, weight),
        (value, score[:2], previous, weight),
        (value, score, previous[:, :8], weight),
        (value, score, None, weight),
        (value, None, previous, weight),
        (value, None, None, weight[:4]),
    ):
        with pytest.raises(ValueError, match="compress_kv: "):
            compress_kv(*bad, EPS, torch.float32)
