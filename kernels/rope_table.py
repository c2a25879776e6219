"""The cosines and sines of the rotary embedding, for every position at once.

All arithmetic is fp32 in one fixed order. Higher precision would be further from the tables the model was trained with.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class YarnScaling:
    """YaRN as the checkpoint's `rope_scaling` states it: interpolate slow frequencies, keep fast ones.

    A frequency that turns more than `beta_fast` times within `original_max_position_embeddings` positions is kept, one
    that turns less than `beta_slow` times is divided by `factor`; between them runs a linear ramp.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float

    def __post_init__(self) -> None:
        if self.factor <= 0 or self.original_max_position_embeddings <= 0 or self.beta_fast < self.beta_slow:
            raise ValueError(f"YarnScaling: factor and positions must be positive, beta_fast >= beta_slow, got {self}")

    def ramp_range(self, rope_dim: int, theta: float) -> tuple[float, float]:
        """First and last frequency index of the ramp: kept up to the first, fully interpolated from the last on."""

        def index_of(rotations: float) -> float:
            wavelength_ratio = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return rope_dim * math.log(wavelength_ratio) / (2 * math.log(theta))

        low = max(math.floor(index_of(self.beta_fast)), 0)
        high = min(math.ceil(index_of(self.beta_slow)), rope_dim - 1)
        return low, high + 0.001 if low == high else high


def rope_frequencies(
    rope_dim: int, theta: float, yarn: YarnScaling | None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The angle per position of each rotated pair: ``theta ** (-2i / rope_dim)``, after YaRN where it applies.

    Args:
        rope_dim: number of rotated channels, even.
        theta: base of the frequencies.
        yarn: None = no scaling.
        device: where the table is computed; the power function of two devices may differ in the last bit.

    Returns:
        [rope_dim / 2], fp32.

    Raises:
        ValueError: an odd or non-positive `rope_dim`, or `theta` not above 1.

    Source: model specification, section 2.3.
    """
    if rope_dim <= 0 or rope_dim % 2 or theta <= 1:
        raise ValueError(f"rope_frequencies: rope_dim must be even and theta > 1, got {rope_dim} and {theta}")
    power = theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32, device=device) / rope_dim)
    if yarn is None:
        return 1.0 / power
    low, high = yarn.ramp_range(rope_dim, theta)
    index = torch.arange(rope_dim // 2, dtype=torch.float32, device=device)
    kept = 1 - ((index - low) / (high - low)).clamp(0, 1)
    return (1.0 / power) * kept + (1.0 / (yarn.factor * power)) * (1 - kept)


def rope_table(
    num_positions: int, rope_dim: int, theta: float, yarn: YarnScaling | None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Row p holds ``cos(p * f_i)`` for every pair i, then ``sin(p * f_i)``.

    Args:
        num_positions: rows to compute, positions 0..num_positions-1.
        rope_dim, theta, yarn, device: see `rope_frequencies`.

    Returns:
        [num_positions, rope_dim], fp32, contiguous.

    Raises:
        ValueError: a negative `num_positions`, or as `rope_frequencies`.

    Source: model specification, section 2.3.
    """
    if num_positions < 0:
        raise ValueError(f"rope_table: num_positions must not be negative, got {num_positions}")
    frequencies = rope_frequencies(rope_dim, theta, yarn, device)
    angles = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
