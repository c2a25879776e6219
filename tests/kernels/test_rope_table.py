"""`rope_table`: the check values of the specification, YaRN's limits, and the fp32 order."""

import math

import pytest
import torch

from deepinfer_plugin.kernels.rope_table import YarnScaling, rope_frequencies, rope_table

YARN = YarnScaling(factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1)
TINY_YARN = YarnScaling(factor=16, original_max_position_embeddings=64, beta_fast=32, beta_slow=1)
# Published with 7 digits (half a unit is 5e-7 of the value at worst) on top of an ulp or two of the power function.
RTOL = 1e-6


def test_frequencies_have_the_published_check_values(device: str) -> None:
    frequencies = rope_frequencies(64, 160000.0, YARN, device)
    want = {1: 0.6876560, 15: 3.635539e-3, 16: 2.265625e-3, 20: 2.969778e-4, 25: 5.372313e-6, 31: 5.680529e-7}
    assert frequencies.dtype == torch.float32
    assert {i: frequencies[i].item() for i in want} == pytest.approx(want, rel=RTOL)


def test_the_ramp_of_the_real_and_of_the_tiny_configuration() -> None:
    assert YARN.ramp_range(64, 160000.0) == (15, 25)
    assert TINY_YARN.ramp_range(32, 160000.0) == (0, 4)


def test_a_ramp_without_width_gets_one() -> None:
    low, high = YarnScaling(16, 64, 1, 1).ramp_range(2, 1e30)
    assert (low, high) in {(0, 1), (0, 0.001)}
    low, high = YarnScaling(16, 64, 100, 50).ramp_range(32, 160000.0)  # both indices lie below 0
    assert (low, high) == (0, pytest.approx(0.001)) or high < 0


def test_without_scaling_the_frequencies_are_powers_of_theta(device: str) -> None:
    frequencies = rope_frequencies(64, 10000.0, None, device)
    want = [10000.0 ** (-2 * i / 64) for i in range(32)]
    assert frequencies.tolist() == pytest.approx(want, rel=RTOL)


def test_yarn_keeps_fast_and_divides_slow_frequencies(device: str) -> None:
    scaled, plain = rope_frequencies(64, 160000.0, YARN, device), rope_frequencies(64, 160000.0, None, device)
    assert torch.equal(scaled[:16], plain[:16])
    torch.testing.assert_close(scaled[25:], plain[25:] / 16, rtol=RTOL, atol=0)
    assert (scaled[16:25] < plain[16:25]).all() and (scaled[16:25] > plain[16:25] / 16).all()


@pytest.mark.parametrize("yarn", [None, YARN, TINY_YARN])
def test_angles_are_fp32_products(yarn: YarnScaling | None, device: str) -> None:
    table = rope_table(5000, 32, 160000.0, yarn, device).cpu()
    frequencies = rope_frequencies(32, 160000.0, yarn, device).cpu()
    assert table.shape == (5000, 32) and table.dtype == torch.float32 and table.is_contiguous()
    for position in (0, 1, 77, 4999):
        angles = (torch.tensor(float(position)) * frequencies).tolist()  # rounded to fp32, then exact
        want = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        # cos and sin of an fp32 library: within 2 units of 2**-24 for values up to 1
        assert table[position].tolist() == pytest.approx(want, rel=0, abs=2**-23)


def test_a_longer_table_has_the_same_rows(device: str) -> None:
    longest = rope_table(300, 64, 160000.0, YARN, device)
    for num_positions in (0, 1, 7, 129):
        assert torch.equal(rope_table(num_positions, 64, 160000.0, YARN, device), longest[:num_positions])


@pytest.mark.parametrize("args", [(-1, 64, 1e4), (4, 63, 1e4), (4, 0, 1e4), (4, 64, 1.0)])
def test_refuses(args: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="^rope_"):
        rope_table(*args, None)


@pytest.mark.parametrize("args", [(0, 64, 32, 1), (16, 0, 32, 1), (16, 64, 1, 32)])
def test_refuses_impossible_scaling(args: tuple[float, int, float, float]) -> None:
    with pytest.raises(ValueError, match="YarnScaling: "):
        YarnScaling(*args)
