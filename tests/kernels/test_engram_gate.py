"""`engram_gate`: against a scalar loop in fp64, by hand, and row by row."""

import math

import pytest
import torch

from deepinfer_plugin.kernels.engram_gate import engram_gate
from tests.kernels.row_subsets import NUM_ROWS, assert_rows_are_independent

EPS, M = 1e-20, 4
# fp32: the dot product and a handful of roundings. bf16: the one rounding at the end, half a unit.
RTOL = {torch.float32: 1e-5, torch.bfloat16: 2**-8 * 1.01}


def random_inputs(num_tokens: int, hidden_size: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    shapes = [(num_tokens, M, hidden_size), (num_tokens, M + 1, hidden_size), (M, hidden_size), (M, hidden_size)]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def gate_by_hand(x: list[float], key: list[float], q_weight: list[float], k_weight: list[float]) -> float:
    inverse = [1 / math.sqrt(sum(a * a for a in row) / len(row) + EPS) for row in (x, key)]
    dot = sum(a * b * c * d for a, b, c, d in zip(x, q_weight, key, k_weight, strict=True))
    dot *= inverse[0] * inverse[1] / math.sqrt(len(x))
    return 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)))


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_ROWS)
@pytest.mark.parametrize("hidden_size", [32, 5])
def test_equals_a_scalar_loop(num_tokens: int, hidden_size: int, dtype: torch.dtype, device: str) -> None:
    streams, key_values, q_weight, k_weight = inputs = random_inputs(num_tokens, hidden_size, dtype, device)
    got = engram_gate(*inputs, EPS, None)
    assert got.dtype == dtype and got.shape == streams.shape
    want = streams.double().cpu()
    x, kv, q, k = (t.double().tolist() for t in inputs)
    for t in range(num_tokens):
        for i in range(M):
            want[t, i] += gate_by_hand(x[t][i], kv[t][i], q[i], k[i]) * torch.tensor(kv[t][M], dtype=torch.float64)
    # The absolute part: a dot product near zero moves the root, and with it the gate, by more than its own error.
    torch.testing.assert_close(got.double().cpu(), want, rtol=RTOL[dtype], atol=1e-4)


def test_gate_by_hand(device: str) -> None:
    streams = torch.tensor([[[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]], device=device)
    key_values = torch.tensor([[[3.0] * 4, [-5.0] * 4, [1.0, -1.0, 1.0, -1.0], [10.0] * 4]], device=device)
    ones = torch.ones(3, 4, device=device)
    gates = ((engram_gate(streams, key_values, ones, ones, EPS, None) - streams) / 10)[0, :, 0].tolist()
    # Parallel, antiparallel, orthogonal: normalised dot 4 / sqrt(4) = 2, -2 and 0; zero counts as positive.
    want = [1 / (1 + math.exp(-root)) for root in (math.sqrt(2), -math.sqrt(2), 1e-3)]
    assert gates == pytest.approx(want, rel=1e-5)


def test_skipped_rows_keep_their_streams(device: str) -> None:
    inputs = random_inputs(6, 16, torch.bfloat16, device)
    inputs[1][2] = torch.nan
    skip = torch.tensor([False, True, True, False, False, True], device=device)
    got, plain = engram_gate(*inputs, EPS, skip), engram_gate(*inputs, EPS, None)
    assert torch.equal(got[skip], inputs[0][skip])
    assert torch.equal(got[~skip], plain[~skip])


def test_takes_strided_inputs(device: str) -> None:
    wide = torch.randn(7, 12, 64, device=device)
    streams, key_values = wide[:, :M, :32], wide[:, M : 2 * M + 1, 32:]
    weights = torch.randn(2, M, 32, device=device)
    got = engram_gate(streams, key_values, *weights, EPS, None)
    assert torch.equal(got, engram_gate(streams.contiguous(), key_values.contiguous(), *weights, EPS, None))


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("hidden_size", [7, 128, 5120])
def test_rows_are_independent(hidden_size: int, dtype: torch.dtype, device: str) -> None:
    streams, key_values, q_weight, k_weight = random_inputs(100, hidden_size, dtype, device)
    skip = torch.rand(100, device=device) < 0.3
    assert_rows_are_independent(
        lambda x, kv, skip: engram_gate(x, kv, q_weight, k_weight, EPS, skip), streams, key_values, skip
    )


def test_refuses(device: str) -> None:
    streams, key_values, q_weight, k_weight = random_inputs(2, 8, torch.float32, device)
    skip = torch.zeros(2, dtype=torch.bool, device=device)
    for args in (
        (streams[0], key_values, q_weight, k_weight, EPS, None),
        (streams, key_values[:, 1:], q_weight, k_weight, EPS, None),
        (streams, key_values, q_weight[1:], k_weight, EPS, None),
        (streams, key_values, q_weight, k_weight[:, 1:], EPS, None),
        (streams, key_values, q_weight, k_weight, 0.0, None),
        (streams, key_values, q_weight, k_weight, EPS, skip[:1]),
        (streams, key_values, q_weight, k_weight, EPS, skip.int()),
    ):
        with pytest.raises(ValueError, match="engram_gate: "):
            engram_gate(*args)
