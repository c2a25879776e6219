"""The number formats, bit by bit, against exact rational arithmetic and a search of the code tables."""

from bisect import bisect_left
from fractions import Fraction

import numpy as np
import pytest
import torch

from deepinfer_plugin.kernels import quant_formats as formats
from tests.kernels.row_subsets import NUM_ROWS, assert_rows_are_independent

E2M1 = [Fraction(v) for v in ("0", "0.5", "1", "1.5", "2", "3", "4", "6")]
E4M3 = [
    Fraction(code & 7, 8) * Fraction(2) ** -6
    if code < 8
    else (1 + Fraction(code & 7, 8)) * Fraction(2) ** ((code >> 3) - 7)
    for code in range(127)  # code 127 is NaN
]
ROUNDERS = [formats.round_fp8, formats.round_fp4_index, formats.round_fp4_kv]


def nearest(value: Fraction, grid: list[Fraction]) -> Fraction:
    """The member of `grid` nearest to |value|, with the sign of `value`; ties to the even code; saturating."""
    magnitude = abs(value)
    above = bisect_left(grid, magnitude)
    if above == len(grid):
        code = above - 1
    elif above == 0:
        code = 0
    else:
        low, high = magnitude - grid[above - 1], grid[above] - magnitude
        code = above if high < low or (high == low and above % 2 == 0) else above - 1
    return grid[code] if value >= 0 else -grid[code]


def power_of_two_sf(amax: Fraction, largest: int, minimum: float) -> Fraction:
    """The smallest power of two that brings `amax` to at most `largest`."""
    amax, sf = max(amax, Fraction(float(np.float32(minimum)))), Fraction(2) ** -160
    while largest * sf < amax:
        sf *= 2
    return sf


def round_group(name: str, group: list[float]) -> list[float]:
    values = [Fraction(v) for v in group]
    amax = max(abs(v) for v in values)
    if name == "round_fp8":
        sf = power_of_two_sf(amax, 448, 1e-4)
        return [float(nearest(v / sf, E4M3) * sf) for v in values]
    if name == "round_fp4_index":
        sf = power_of_two_sf(amax, 6, 6 * 2.0**-126)
        return [float(nearest(v / sf, E2M1) * sf) for v in values]
    sixth = np.float32(float(amax)) / np.float32(6)
    sf = nearest(min(max(Fraction(float(sixth)), E4M3[1]), E4M3[-1]), E4M3)
    inverse = np.float32(1) / np.float32(float(sf))
    return [float(nearest(Fraction(float(np.float32(v) * inverse)), E2M1) * sf) for v in group]


def round_by_hand(name: str, x: torch.Tensor) -> torch.Tensor:
    size = 16 if name == "round_fp4_kv" else 32
    groups = x.float().reshape(-1, size).tolist()
    return torch.tensor([round_group(name, group) for group in groups]).view(x.shape).to(x.dtype)


def edge_groups(size: int) -> torch.Tensor:
    """Groups whose largest member lies on, just above and just below a power of two times 448 or 6."""
    infinity = torch.tensor(torch.inf)
    peaks = torch.tensor([base * 2.0**k for base in (448.0, 6.0) for k in (-30, -9, -3, 0, 1, 5)])
    peaks = torch.cat([peaks, torch.nextafter(peaks, infinity), torch.nextafter(peaks, -infinity)])
    groups = torch.randn(len(peaks), size) * peaks[:, None] / 4
    groups = groups.clamp(-peaks[:, None], peaks[:, None])
    groups[:, size // 2] = -peaks
    return groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rounder", ROUNDERS, ids=lambda f: f.__name__)
def test_round_trips_equal_exact_arithmetic(rounder, dtype: torch.dtype, device: str) -> None:
    magnitudes = 10.0 ** torch.arange(-8.0, 6.0)
    x = torch.cat([torch.randn(14, 64) * magnitudes[:, None], edge_groups(64), torch.zeros(1, 64)]).to(dtype)
    got = rounder(x.to(device))
    assert got.dtype == dtype
    assert torch.equal(got.cpu(), round_by_hand(rounder.__name__, x))


@pytest.mark.parametrize("rounder", ROUNDERS, ids=lambda f: f.__name__)
def test_round_trips_are_idempotent_on_their_own_values_and_exact_in_bf16(rounder, device: str) -> None:
    once = rounder(torch.randn(50, 64, device=device))
    assert torch.equal(once, once.bfloat16().float())
    assert torch.equal(rounder(once.bfloat16()), once.bfloat16()) or rounder is formats.round_fp4_kv  # its sf may move


def test_the_fp8_scale_steps_right_after_448_times_a_power_of_two(device: str) -> None:
    for exponent in (-20, -1, 0, 7):
        peak = torch.tensor(448 * 2.0**exponent)
        for amax, sf in ((peak, 2.0**exponent), (torch.nextafter(peak, peak * 2), 2.0 ** (exponent + 1))):
            x = torch.zeros(1, 32, device=device)
            x[0, 3] = amax
            assert formats.encode_fp8_rows(x)[1].float().item() == sf


def test_the_fp8_scale_has_a_floor(device: str) -> None:
    _, sf = formats.encode_fp8_rows(torch.zeros(1, 32, device=device))
    assert sf.float().item() == 2.0**-22  # 1e-4 / 448 = 2.2e-7, rounded up


def test_e2m1_midpoints_go_to_the_even_code(device: str) -> None:
    x = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] + [-0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6])
    want = torch.tensor([6, 0, 1, 1, 2, 2, 4, 4.0] + [0, -1, -1, -2, -2, -4, -4, -6])
    assert formats.round_fp4_kv(x.to(device)).tolist() == want.tolist()
    assert formats.round_fp4_index(x.repeat(2).to(device)).tolist() == want.tolist() * 2


def test_fp4_kv_saturates_beyond_the_largest_scale(device: str) -> None:
    x = torch.full((16,), -1e6, device=device)
    assert formats.round_fp4_kv(x).tolist() == [-6 * 448.0] * 16


def test_fp4_kv_multiplies_by_the_reciprocal(device: str) -> None:
    sf, midpoint = 13.0, 2.5  # fl(1 / 13) is above 1 / 13: the product passes the midpoint, a quotient would not
    x = torch.zeros(16, device=device)
    x[0], x[1] = 6 * sf, midpoint * sf
    product = np.float32(midpoint * sf) * (np.float32(1) / np.float32(sf))
    want = 3.0 if product > midpoint else 2.0
    assert formats.round_fp4_kv(x).tolist()[1] == want * sf


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_e8m0_decodes_every_byte(dtype: torch.dtype, device: str) -> None:
    sf = torch.arange(255, dtype=torch.uint8, device=device).view(dtype)
    assert formats.e8m0_decode(sf).tolist() == [2.0 ** (byte - 127) for byte in range(255)]


def test_fp4_decodes_every_byte_low_nibble_first(device: str) -> None:
    values = [float(v) for v in E2M1] + [-float(v) for v in E2M1]
    packed = torch.arange(256, dtype=torch.uint8, device=device).view(torch.int8).view(16, 16)
    sf = torch.arange(120, 136, dtype=torch.uint8, device=device).view(16, 1)
    want = [
        [values[b & 15] * 2.0 ** (r - 7), values[b >> 4] * 2.0 ** (r - 7)]
        for r in range(16)
        for b in range(16 * r, 16 * r + 16)
    ]
    for weight in (packed, packed.view(torch.uint8)):
        assert formats.decode_fp4(weight, sf).flatten().tolist() == [v for pair in want for v in pair]


def test_fp8_decodes_every_code(device: str) -> None:
    codes = torch.tensor([c for c in range(256) if c & 127 != 127] + [0, 0], dtype=torch.uint8, device=device)
    values = [float(E4M3[c & 127]) * (-1 if c & 128 else 1) for c in codes.tolist()]
    rows = codes.view(torch.float8_e4m3fn).view(8, 32)
    sf = torch.arange(118, 126, dtype=torch.uint8, device=device).view(8, 1)
    want = [v * 2.0 ** (i // 32 - 9) for i, v in enumerate(values)]
    assert formats.decode_fp8_rows(rows, sf).flatten().tolist() == want


@pytest.mark.parametrize("shape", [(32, 32), (33, 64), (1, 31), (70, 100), (0, 32)])
def test_fp8_blocks_scale_each_element_by_its_block(shape: tuple[int, int], device: str) -> None:
    weight = torch.randn(shape, device=device).to(torch.float8_e4m3fn)
    sf = torch.randint(100, 140, (-(-shape[0] // 32), -(-shape[1] // 32)), dtype=torch.uint8, device=device)
    got, plain = formats.decode_fp8_blocks(weight, sf), weight.float()
    for n in range(shape[0]):
        for k in range(0, shape[1], 7):
            assert got[n, k] == plain[n, k] * 2.0 ** (sf[n // 32, k // 32].item() - 127)
    assert got.shape == shape


@pytest.mark.parametrize("shape", [(32, 32), (33, 64), (1, 31), (70, 100)])
def test_encoded_fp8_blocks_decode_to_the_nearest_values(shape: tuple[int, int], device: str) -> None:
    weight = torch.randn(shape)
    codes, sf = formats.encode_fp8_blocks(weight.to(device))
    assert codes.dtype == torch.float8_e4m3fn and sf.dtype == torch.float8_e8m0fnu
    got = formats.decode_fp8_blocks(codes, sf).cpu()
    for top in range(0, shape[0], 32):
        for left in range(0, shape[1], 32):
            block = weight[top : top + 32, left : left + 32]
            want = torch.tensor(round_group("round_fp8", block.flatten().tolist())).view(block.shape)
            assert torch.equal(got[top : top + 32, left : left + 32], want)


def test_encoded_rows_decode_to_the_round_trip(device: str) -> None:
    x = torch.randn(5, 96, device=device)
    codes, sf = formats.encode_fp8_rows(x)
    assert codes.shape == (5, 96) and sf.shape == (5, 3) and sf.dtype == torch.float8_e8m0fnu
    assert torch.equal(formats.decode_fp8_rows(codes, sf), formats.round_fp8(x))


def test_encoded_fp4_decodes_to_the_round_trip(device: str) -> None:
    weight = torch.randn(5, 96, device=device)
    codes, sf = formats.encode_fp4(weight)
    assert codes.shape == (5, 48) and codes.dtype == torch.int8
    assert sf.shape == (5, 3) and sf.dtype == torch.float8_e8m0fnu
    assert torch.equal(formats.decode_fp4(codes, sf), formats.round_fp4_index(weight))


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("rounder", ROUNDERS, ids=lambda f: f.__name__)
def test_any_leading_dimensions_and_strides(rounder, num_rows: int, device: str) -> None:
    wide = torch.randn(num_rows, 3, 128, device=device)
    rows = wide[:, 1:, 32:96]
    assert torch.equal(rounder(rows), rounder(rows.contiguous().view(-1, 64)).view(rows.shape))
    assert torch.equal(wide[:, 1:, 32:96], rows)


@pytest.mark.parametrize("rounder", ROUNDERS, ids=lambda f: f.__name__)
def test_rows_are_independent(rounder, device: str) -> None:
    assert_rows_are_independent(rounder, torch.randn(100, 96, device=device))


def test_refuses(device: str) -> None:
    odd, byte = torch.zeros(4, 33, device=device), torch.zeros(4, 32, dtype=torch.uint8, device=device)
    codes, sf = byte.view(torch.float8_e4m3fn), torch.zeros(1, 2, dtype=torch.uint8, device=device)
    for call in (
        *(lambda f=f: f(odd) for f in (*ROUNDERS, formats.encode_fp8_rows, formats.encode_fp4)),
        lambda: formats.encode_fp8_blocks(odd[0]),
        lambda: formats.e8m0_decode(odd),
        lambda: formats.decode_fp8_blocks(odd, sf),
        lambda: formats.decode_fp8_blocks(codes, sf),
        lambda: formats.decode_fp8_rows(byte, sf),
        lambda: formats.decode_fp8_rows(codes, sf),
        lambda: formats.decode_fp4(byte, sf),
        lambda: formats.decode_fp4(byte[:, :7], sf),
    ):
        with pytest.raises(ValueError, match=", got "):
            call()
