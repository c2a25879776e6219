"""The hyper-connection ops: against scalar loops in fp64, by hand, and row by row."""

import math

import pytest
import torch

from deepinfer_plugin.kernels.hyper_connection import (
    collapse_streams,
    mix_collapse_norm,
    mix_streams,
    stream_coefficients,
)
from deepinfer_plugin.kernels.quant_formats import round_fp8
from deepinfer_plugin.kernels.rms_norm import rms_norm
from tests.kernels.row_subsets import NUM_ROWS, assert_rows_are_independent

M, NORM_EPS, HC_EPS, NUM_ITERS = 4, 1e-20, 1e-6, 20
HALF_UNIT = {torch.float32: 0.0, torch.bfloat16: 2**-8}  # the one rounding at the end
SUM_ERROR = 16 * 2**-24  # five fp32 products and their sum, of the sum of the magnitudes


def random_parameters(hidden_size: int, device: str, m: int = M) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_logits = 2 * m + m * m
    fn = torch.randn(num_logits, m * hidden_size, device=device) / hidden_size**0.5
    return fn, torch.randn(3, device=device), torch.randn(num_logits, device=device)


def coefficients_by_hand(v, fn, scale, base, m: int, num_iters: int) -> tuple[list, list, list]:
    """The specification's steps, one number after the other, in Python's doubles."""
    inverse_rms = 1 / math.sqrt(sum(a * a for a in v) / len(v) + NORM_EPS)
    z = [sum(a * b for a, b in zip(row, v, strict=True)) * inverse_rms for row in fn]
    logits = [value * scale[min(i // m, 2)] + base[i] for i, value in enumerate(z)]
    sigmoid = [1 / (1 + math.exp(-a)) for a in logits[: 2 * m]]
    a = []
    for i in range(m):
        row = [math.exp(c) for c in logits[2 * m + i * m : 3 * m + i * m]]
        a.append([c / sum(row) + HC_EPS for c in row])
    for iteration in range(num_iters):
        if iteration:
            a = [[c / (sum(row) + HC_EPS) for c in row] for row in a]
        sums = [sum(row[j] for row in a) + HC_EPS for j in range(m)]
        a = [[row[j] / sums[j] for j in range(m)] for row in a]
    return [s + HC_EPS for s in sigmoid[:m]], [2 * s for s in sigmoid[m:]], a


@pytest.mark.parametrize("dtype", HALF_UNIT, ids=str)
@pytest.mark.parametrize("num_iters", [1, 2, NUM_ITERS])
@pytest.mark.parametrize("m, hidden_size", [(4, 32), (2, 24), (4, 5)])
def test_coefficients_equal_a_scalar_loop(
    m: int, hidden_size: int, num_iters: int, dtype: torch.dtype, device: str
) -> None:
    streams = torch.randn(17, m, hidden_size, device=device).to(dtype)
    fn, scale, base = random_parameters(hidden_size, device, m)
    pre, post, comb = stream_coefficients(streams, fn, scale, base, NORM_EPS, HC_EPS, num_iters)
    assert pre.dtype == post.dtype == comb.dtype == torch.float32
    parameters = fn.tolist(), scale.tolist(), base.tolist()
    for i, v in enumerate(streams.flatten(1).tolist()):
        want = coefficients_by_hand(v, *parameters, m, num_iters)
        # Logits of order 5 from fp32 sums of up to 128 products: 1e-5 covers them and forty normalisations.
        for got, expected in zip((pre, post, comb), want, strict=True):
            torch.testing.assert_close(got[i].cpu(), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spread", [3.0, 30.0])
def test_comb_is_doubly_stochastic_and_keeps_extreme_logits_finite(spread: float, device: str) -> None:
    streams, (fn, scale, _) = torch.randn(33, M, 32, device=device), random_parameters(32, device)
    base = spread * torch.randn(24, device=device)
    _, _, comb = stream_coefficients(streams, fn, scale, base, NORM_EPS, HC_EPS, NUM_ITERS)
    # Columns were normalised last: they sum to 1 - eps; rows are as near as twenty iterations bring them.
    torch.testing.assert_close(comb.sum(1), torch.full((33, M), 1 - HC_EPS, device=device), rtol=0, atol=1e-6)
    assert comb.isfinite().all() and (comb >= 0).all()


@pytest.mark.parametrize("num_tokens", NUM_ROWS)
@pytest.mark.parametrize("hidden_size", [1, 128])
def test_coefficients_have_their_shapes(num_tokens: int, hidden_size: int, device: str) -> None:
    streams = torch.ones(num_tokens, M, hidden_size, device=device)
    got = stream_coefficients(streams, *random_parameters(hidden_size, device), NORM_EPS, HC_EPS, NUM_ITERS)
    assert [t.shape for t in got] == [(num_tokens, M), (num_tokens, M), (num_tokens, M, M)]


def test_coefficients_without_influence_of_the_streams(device: str) -> None:
    fn, scale = torch.zeros(24, M * 8, device=device), torch.ones(3, device=device)
    base = torch.tensor([math.log(3)] * 4 + [-math.log(3)] * 4 + [0.0] * 16, device=device)
    streams = torch.ones(1, M, 8, device=device)
    pre, post, comb = stream_coefficients(streams, fn, scale, base, NORM_EPS, HC_EPS, NUM_ITERS)
    assert pre[0].tolist() == pytest.approx([0.75 + HC_EPS] * 4, rel=1e-7)
    assert post[0].tolist() == pytest.approx([0.5] * 4, rel=1e-6)
    assert comb.flatten().tolist() == pytest.approx([0.25] * 16, rel=2e-6)


@pytest.mark.parametrize("dtype", HALF_UNIT, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_ROWS)
@pytest.mark.parametrize("m, hidden_size", [(4, 128), (4, 7), (2, 33)])
def test_mix_equals_the_sum_in_fp64(num_tokens: int, m: int, hidden_size: int, dtype: torch.dtype, device: str) -> None:
    streams = torch.randn(num_tokens, m, hidden_size, device=device).to(dtype)
    y = torch.randn(num_tokens, hidden_size, device=device).to(dtype)
    post, comb = torch.rand(num_tokens, m, device=device), torch.rand(num_tokens, m, m, device=device)
    got = mix_streams(streams, y, post, comb)
    assert got.dtype == dtype and got.shape == streams.shape
    for j in range(m):
        terms = [post[:, j, None].double() * y.double()]
        terms += [comb[:, i, j, None].double() * streams[:, i].double() for i in range(m)]
        want, magnitude = sum(terms), sum(term.abs() for term in terms)
        bound = SUM_ERROR * magnitude + HALF_UNIT[dtype] * want.abs() * 1.01
        assert ((got[:, j].double() - want).abs() <= bound).all()


def test_mix_takes_the_source_from_the_row_of_comb(device: str) -> None:
    streams = torch.tensor([[[1.0], [10.0]]], device=device)
    comb = torch.tensor([[[0.0, 1.0], [0.0, 2.0]]], device=device)  # everything flows into stream 1
    y, post = torch.tensor([[100.0]], device=device), torch.tensor([[3.0, 4.0]], device=device)
    assert mix_streams(streams, y, post, comb).flatten().tolist() == [300.0, 421.0]


def test_mix_rounds_the_output_of_the_sub_layer_first(device: str) -> None:
    streams, comb = torch.zeros(1, 2, 1, device=device).bfloat16(), torch.zeros(1, 2, 2, device=device)
    y, post = torch.tensor([[1 + 2**-8 + 2**-12]], device=device), torch.tensor([[2**-8, 1.0]], device=device)
    assert mix_streams(streams, y, post, comb).flatten().tolist() == [2**-8 * (1 + 2**-7), 1 + 2**-7]


@pytest.mark.parametrize("dtype", HALF_UNIT, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_ROWS)
@pytest.mark.parametrize("m, hidden_size", [(4, 128), (4, 7), (2, 33)])
def test_mix_collapse_norm_is_the_three_ops(
    num_tokens: int, m: int, hidden_size: int, dtype: torch.dtype, device: str
) -> None:
    streams = torch.randn(num_tokens, m, hidden_size, device=device).to(dtype)
    y, weight = torch.randn(num_tokens, hidden_size, device=device), torch.randn(hidden_size, device=device).to(dtype)
    post, comb = torch.rand(num_tokens, m, device=device), torch.rand(num_tokens, m, m, device=device)
    pre_mix = torch.rand(num_tokens, m, device=device)
    rounds = hidden_size % 32 == 0
    mixed, hidden, rounded = mix_collapse_norm(streams, y, post, comb, pre_mix, weight, 1e-6, rounds)
    assert torch.equal(rounded, round_fp8(hidden) if rounds else hidden)
    assert torch.allclose(mixed.double(), mix_streams(streams, y, post, comb).double(), rtol=2**-7, atol=1e-6)
    want = rms_norm(collapse_streams(mixed, pre_mix), weight, 1e-6)
    assert hidden.dtype == mixed.dtype == dtype
    # sums of one row may run in another order: a few units of fp32, or the next bf16 number, before and after the norm
    assert torch.allclose(hidden.double(), want.double(), rtol=2**-6 if dtype == torch.bfloat16 else 2**-18, atol=1e-5)


@pytest.mark.parametrize("dtype", HALF_UNIT, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_ROWS)
@pytest.mark.parametrize("m, hidden_size", [(4, 128), (4, 7), (2, 33)])
def test_collapse_equals_the_sum_in_fp64(
    num_tokens: int, m: int, hidden_size: int, dtype: torch.dtype, device: str
) -> None:
    streams = torch.randn(num_tokens, m, hidden_size, device=device).to(dtype)
    pre_mix = torch.rand(num_tokens, m, device=device)
    got = collapse_streams(streams, pre_mix)
    assert got.dtype == dtype and got.shape == (num_tokens, hidden_size)
    terms = [pre_mix[:, i, None].double() * streams[:, i].double() for i in range(m)]
    want, magnitude = sum(terms), sum(term.abs() for term in terms)
    assert ((got.double() - want).abs() <= SUM_ERROR * magnitude + HALF_UNIT[dtype] * want.abs() * 1.01).all()


def test_collapse_with_a_one_hot_mix_is_that_stream(device: str) -> None:
    streams = torch.randn(3, M, 16, device=device).bfloat16()
    pre_mix = torch.tensor([[0.0, 0.0, 1.0, 0.0]], device=device).expand(3, M)
    assert torch.equal(collapse_streams(streams, pre_mix), streams[:, 2])


def test_take_strided_streams(device: str) -> None:
    wide = torch.randn(9, 6, 64, device=device)
    streams = wide[:, 1:5, 16:48]
    post, comb, y = torch.rand(9, M, device=device), torch.rand(9, M, M, device=device), wide[:, 0, :32]
    plain = streams.contiguous()
    assert torch.equal(mix_streams(streams, y, post, comb), mix_streams(plain, y.contiguous(), post, comb))
    assert torch.equal(collapse_streams(streams, post), collapse_streams(plain, post))
    args = (*random_parameters(32, device), NORM_EPS, HC_EPS, NUM_ITERS)
    for got, want in zip(stream_coefficients(streams, *args), stream_coefficients(plain, *args), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", HALF_UNIT, ids=str)
@pytest.mark.parametrize("hidden_size", [7, 128, 5120])
def test_rows_are_independent(hidden_size: int, dtype: torch.dtype, device: str) -> None:
    streams = torch.randn(100, M, hidden_size, device=device).to(dtype)
    y = torch.randn(100, hidden_size, device=device).to(dtype)
    args = (*random_parameters(hidden_size, device), NORM_EPS, HC_EPS, NUM_ITERS)
    post, comb = torch.rand(100, M, device=device), torch.rand(100, M, M, device=device)
    assert_rows_are_independent(lambda x: stream_coefficients(x, *args), streams)
    assert_rows_are_independent(mix_streams, streams, y, post, comb)
    assert_rows_are_independent(collapse_streams, streams, post)
    weight = torch.ones(hidden_size, device=device, dtype=dtype)
    norm = weight, 1e-6, hidden_size > 7
    assert_rows_are_independent(lambda *rows: mix_collapse_norm(*rows, *norm), streams, y, post, comb, post)


def test_refuse(device: str) -> None:
    streams, y = torch.zeros(2, M, 8, device=device), torch.zeros(2, 8, device=device)
    post, comb = torch.zeros(2, M, device=device), torch.zeros(2, M, M, device=device)
    fn, scale, base = random_parameters(8, device)
    for args in (
        (y, y, post, comb),
        (streams, y[:1], post, comb),
        (streams, y, post[:, :3], comb),
        (streams, y, post, comb[:, :3]),
        (streams, y, post.bfloat16(), comb),
    ):
        with pytest.raises(ValueError, match="mix_streams: "):
            mix_streams(*args)
    for args in (
        (y, fn, scale, base, NORM_EPS, HC_EPS, 20),
        (streams, fn[1:], scale, base, NORM_EPS, HC_EPS, 20),
        (streams, fn, scale[:2], base, NORM_EPS, HC_EPS, 20),
        (streams, fn, scale, base[1:], NORM_EPS, HC_EPS, 20),
        (streams, fn.bfloat16(), scale, base, NORM_EPS, HC_EPS, 20),
        (streams, fn, scale, base, NORM_EPS, HC_EPS, 0),
    ):
        with pytest.raises(ValueError, match="stream_coefficients: "):
            stream_coefficients(*args)
    for args in ((y, post), (streams, post[:, :2]), (streams, post.bfloat16())):
        with pytest.raises(ValueError, match="collapse_streams: "):
            collapse_streams(*args)
