"""The three round trips of activations and cache entries, by nearest representable value.

Source: model specification, section 4.3.
"""

import math

import torch

from tests.oracle.checkpoint import E2M1

# every finite E4M3 magnitude, in the order of its code: exponent 0 is subnormal, code 127 is NaN
E4M3 = torch.tensor(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1],
    dtype=torch.float64,
)


def nearest(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Magnitudes of `x` on `grid`, ascending from 0 in the order of codes; ties to the even code; saturating."""
    size = x.abs().clamp(max=float(grid[-1]))
    upper = torch.searchsorted(grid, size).clamp(1, len(grid) - 1)
    below, above = grid[upper - 1], grid[upper]
    takes_upper = (size - below > above - size) | ((size - below == above - size) & (upper % 2 == 0))
    return torch.where(takes_upper, above, below) * x.sign()


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """2**ceil(log2 x), exactly: x = mantissa * 2**exponent with the mantissa in [0.5, 1)."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def _in_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.double().unflatten(-1, (-1, size))


def fq8(x: torch.Tensor) -> torch.Tensor:
    """E4M3 in groups of 32 with a power-of-two factor."""
    groups = _in_groups(x, 32)
    factor = power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)
    return (nearest(groups / factor, E4M3) * factor).flatten(-2)


def fq4i(x: torch.Tensor) -> torch.Tensor:
    """E2M1 in groups of 32 with a power-of-two factor."""
    groups = _in_groups(x, 32)
    factor = power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6)
    return (nearest(groups / factor, E2M1) * factor).flatten(-2)


def fq4k(x: torch.Tensor) -> torch.Tensor:
    """E2M1 in groups of 16 with an E4M3 factor, whose fp32 reciprocal multiplies."""
    groups = _in_groups(x, 16)
    factor = nearest((groups.abs().amax(-1, keepdim=True) / 6).clamp(2.0**-9, 448), E4M3)
    reciprocal = (1 / factor.float()).double()
    return (nearest(groups * reciprocal, E2M1) * factor).flatten(-2)


ROUND = {"activation": fq8, "local_kv": fq8, "entry": fq4k, "index": fq4i}
GROUP = {"activation": 32, "local_kv": 32, "entry": 16, "index": 32}
assert math.isclose(float(E4M3[-1]), 448)
