"""The number formats of the checkpoint and of the caches: decoders, encoders, and the quantiser round trips.

Scales move as bytes and as fp32 bit patterns only: a numeric cast between E8M0 and integers would convert the value,
and a logarithm in floating point is off by one beside powers of two.
"""

import math
from functools import cache

import torch

BLOCK_SIZE = 32  # channels (and rows of a weight block) that share one E8M0 scale
KV_GROUP_SIZE = 16  # channels of a main-KV row that share one E4M3 scale
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0..7; codes 8..15 are their negatives
MIN_FP8_AMAX = 1e-4
MIN_FP4_AMAX = 6 * 2.0**-126  # keeps the scale a normal number
MIN_FP4_KV_SF = 2.0**-9  # the smallest positive E4M3 number


def e8m0_decode(sf: torch.Tensor) -> torch.Tensor:
    """Return ``2 ** (byte - 127)`` in fp32, exact for every byte 0..254 (255, the format's NaN, does not occur).

    Args:
        sf: any shape, uint8 or float8_e8m0fnu.

    Returns:
        fp32, the shape of `sf`.

    Raises:
        ValueError: an element that is not one byte wide.

    Source: model specification, section 4.1.
    """
    if sf.element_size() != 1:
        raise ValueError(f"e8m0_decode: sf must be uint8 or float8_e8m0fnu, got {sf.dtype}")
    exponent = sf.view(torch.uint8).to(torch.int32) << 23
    return exponent.clamp_(min=1 << 22).view(torch.float32)  # byte 0 is 2**-127, a subnormal: mantissa bit 22


def decode_fp8_blocks(weight: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    """Return ``weight[n, k] * sf[n // 32, k // 32]`` in fp32.

    Args:
        weight: [N, K], float8_e4m3fn.
        sf: [ceil(N / 32), ceil(K / 32)], E8M0 bytes (uint8 or float8_e8m0fnu).

    Returns:
        [N, K], fp32; every value is exact in bf16 too.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: model specification, section 4.2.
    """
    if weight.dim() != 2 or weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"decode_fp8_blocks: weight must be [N, K] float8_e4m3fn, got {_describe(weight)}")
    num_rows, num_columns = weight.shape
    blocks = (math.ceil(num_rows / BLOCK_SIZE), math.ceil(num_columns / BLOCK_SIZE))
    if sf.shape != blocks:
        raise ValueError(f"decode_fp8_blocks: sf must be {list(blocks)} for this weight, got {_describe(sf)}")
    return weight.float() * _spread_blocks(e8m0_decode(sf), num_rows, num_columns)


def decode_fp8_rows(codes: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    """Return ``codes[..., c] * sf[..., c // 32]`` in fp32: rows with a scale per 32 channels (the Engram tables).

    Args:
        codes: [..., C], float8_e4m3fn, C a multiple of 32.
        sf: [..., C / 32], E8M0 bytes (uint8 or float8_e8m0fnu).

    Returns:
        [..., C], fp32.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: model specification, section 4.1.
    """
    if codes.dtype != torch.float8_e4m3fn or codes.shape[-1] % BLOCK_SIZE:
        raise ValueError(f"decode_fp8_rows: codes must be [..., 32n] float8_e4m3fn, got {_describe(codes)}")
    if sf.shape != (*codes.shape[:-1], codes.shape[-1] // BLOCK_SIZE):
        raise ValueError(f"decode_fp8_rows: sf must hold one byte per 32 channels, got {_describe(sf)}")
    return _grouped(codes.float(), BLOCK_SIZE).mul(e8m0_decode(sf).unsqueeze(-1)).reshape(codes.shape)


def decode_fp4(weight: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 values times their scales, in fp32. The low nibble holds the even column.

    Args:
        weight: [N, K / 2], int8 or uint8, two codes a byte.
        sf: [N, K / 32], E8M0 bytes (uint8 or float8_e8m0fnu).

    Returns:
        [N, K], fp32; every value is exact in bf16 too.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: model specification, section 4.2.
    """
    if weight.dim() != 2 or weight.element_size() != 1 or 2 * weight.shape[1] % BLOCK_SIZE:
        raise ValueError(f"decode_fp4: weight must be [N, 16n] bytes, got {_describe(weight)}")
    num_rows, num_columns = weight.shape[0], 2 * weight.shape[1]
    if sf.shape != (num_rows, num_columns // BLOCK_SIZE):
        raise ValueError(f"decode_fp4: sf must be [N, K / 32] for this weight, got {_describe(sf)}")
    values = _e2m1_pairs(weight.device)[weight.view(torch.uint8).int()]  # [N, K / 2, 2]
    return _grouped(values.view(num_rows, num_columns), BLOCK_SIZE).mul(e8m0_decode(sf).unsqueeze(-1)).flatten(1)


def encode_fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to E4M3 with one power-of-two scale per 32x32 block; `decode_fp8_blocks` reads the result.

    Args:
        weight: [N, K], any float dtype; N and K need not be multiples of 32.

    Returns:
        codes [N, K] float8_e4m3fn and sf [ceil(N / 32), ceil(K / 32)] float8_e8m0fnu.

    Raises:
        ValueError: not a matrix.

    Source: model specification, sections 4.1 and 4.3.
    """
    if weight.dim() != 2:
        raise ValueError(f"encode_fp8_blocks: weight must be [N, K], got {_describe(weight)}")
    num_rows, num_columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -num_columns % BLOCK_SIZE, 0, -num_rows % BLOCK_SIZE))
    rows, columns = padded.shape[0] // BLOCK_SIZE, padded.shape[1] // BLOCK_SIZE
    amax = padded.view(rows, BLOCK_SIZE, columns, BLOCK_SIZE).abs().amax((1, 3))
    sf = _fp8_sf(amax)
    codes = weight.float().div(_spread_blocks(sf, num_rows, num_columns)).to(torch.float8_e4m3fn)
    return codes, _e8m0_encode(sf)


def encode_fp8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to E4M3 with one power-of-two scale per 32 channels; `decode_fp8_rows` reads the result.

    Args:
        rows: [..., C], any float dtype, C a multiple of 32.

    Returns:
        codes [..., C] float8_e4m3fn and sf [..., C / 32] float8_e8m0fnu.

    Raises:
        ValueError: C not a multiple of 32.

    Source: model specification, sections 4.1 and 4.3.
    """
    _check_groups("encode_fp8_rows", rows, BLOCK_SIZE)
    groups = _grouped(rows.float(), BLOCK_SIZE)
    sf = _fp8_sf(groups.abs().amax(-1, keepdim=True))
    return groups.div(sf).to(torch.float8_e4m3fn).view(rows.shape), _e8m0_encode(sf.squeeze(-1))


def encode_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to packed E2M1 with one power-of-two scale per 32 columns; `decode_fp4` reads the result.

    Args:
        weight: [N, K], any float dtype, K a multiple of 32.

    Returns:
        codes [N, K / 2] int8 (low nibble = even column) and sf [N, K / 32] float8_e8m0fnu.

    Raises:
        ValueError: not a matrix, or K not a multiple of 32.

    Source: model specification, sections 4.1 and 4.3.
    """
    if weight.dim() != 2:
        raise ValueError(f"encode_fp4: weight must be [N, K], got {_describe(weight)}")
    _check_groups("encode_fp4", weight, BLOCK_SIZE)
    groups = _grouped(weight.float(), BLOCK_SIZE)
    sf = _fp4_sf(groups.abs().amax(-1, keepdim=True))
    return _pack_e2m1(groups / sf).flatten(1).view(torch.int8), _e8m0_encode(sf.squeeze(-1))


def encode_fp4_kv(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to packed E2M1 with an E4M3 scale per 16 channels; the values are those of `round_fp4_kv`.

    Args:
        rows: [..., C], any float dtype, C a multiple of 16.

    Returns:
        codes [..., C / 2] uint8 (low nibble = even channel) and sf [..., C / 16] float8_e4m3fn.

    Raises:
        ValueError: C not a multiple of 16.

    Source: model specification, section 4.3.
    """
    _check_groups("encode_fp4_kv", rows, KV_GROUP_SIZE)
    groups = _grouped(rows.float(), KV_GROUP_SIZE)
    sf = _fp4_kv_sf(groups)
    return _pack_e2m1(groups * sf.float().reciprocal()).flatten(-2), sf.squeeze(-1)


def decode_fp4_kv(codes: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 values times their E4M3 scales: rows with a scale per 16 channels (compressed KV).

    Args:
        codes: [..., C / 2], uint8, the low nibble the even channel.
        sf: [..., C / 16], float8_e4m3fn.

    Returns:
        [..., C], fp32.

    Source: model specification, section 4.4.
    """
    values = _e2m1_pairs(codes.device)[codes.int()].flatten(-2)
    return _grouped(values, KV_GROUP_SIZE).mul(sf.float().unsqueeze(-1)).flatten(-2)


def round_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round to what E4M3 with a power-of-two scale per 32 channels can hold (`fq8` of the specification).

    The scale is ``2 ** ceil(log2(max(amax, 1e-4) / 448))``. It is rounded up, so no finite value leaves +-448 and the
    cast needs no clamp. A group of zeros stays zero.

    Args:
        x: [..., C], bf16 or fp32, C a multiple of 32.

    Returns:
        A new tensor of the shape and dtype of `x`; exact in bf16.

    Raises:
        ValueError: C not a multiple of 32.

    Source: model specification, section 4.3.
    """
    _check_groups("round_fp8", x, BLOCK_SIZE)
    groups = _grouped(x.float(), BLOCK_SIZE)
    sf = _fp8_sf(groups.abs().amax(-1, keepdim=True))
    rounded = groups.div(sf).to(torch.float8_e4m3fn).to(torch.float32)
    return rounded.mul_(sf).view(x.shape).to(x.dtype)


def round_fp4_index(x: torch.Tensor) -> torch.Tensor:
    """Round to what E2M1 with a power-of-two scale per 32 channels can hold (`fq4i`: indexer queries and keys).

    The scale is ``2 ** ceil(log2(max(amax, 6 * 2 ** -126) / 6))``. A group of zeros stays zero.

    Args:
        x: [..., C], bf16 or fp32, C a multiple of 32.

    Returns:
        A new tensor of the shape and dtype of `x`; exact in bf16.

    Raises:
        ValueError: C not a multiple of 32.

    Source: model specification, section 4.3.
    """
    _check_groups("round_fp4_index", x, BLOCK_SIZE)
    groups = _grouped(x.float(), BLOCK_SIZE)
    sf = _fp4_sf(groups.abs().amax(-1, keepdim=True))
    return _round_e2m1(groups / sf).mul_(sf).view(x.shape).to(x.dtype)


def round_fp4_kv(x: torch.Tensor) -> torch.Tensor:
    """Round to what E2M1 with an E4M3 scale per 16 channels can hold (`fq4k`: the main KV).

    The scale is ``clamp(amax / 6, 2 ** -9, 448)`` rounded to E4M3. Values are multiplied by the fp32 reciprocal of the
    rounded scale, not divided by it: the two differ in a few codes. A group of zeros stays zero.

    Args:
        x: [..., C], bf16 or fp32, C a multiple of 16.

    Returns:
        A new tensor of the shape and dtype of `x`; exact in bf16. Magnitudes beyond 6 * 448 saturate.

    Raises:
        ValueError: C not a multiple of 16.

    Source: model specification, section 4.3.
    """
    _check_groups("round_fp4_kv", x, KV_GROUP_SIZE)
    groups = _grouped(x.float(), KV_GROUP_SIZE)
    sf = _fp4_kv_sf(groups).to(torch.float32)
    return _round_e2m1(groups * sf.reciprocal()).mul_(sf).view(x.shape).to(x.dtype)


def _fp4_kv_sf(groups: torch.Tensor) -> torch.Tensor:
    amax = groups.abs().amax(-1, keepdim=True)
    return amax.div_(E2M1_MAX).clamp_(MIN_FP4_KV_SF, E4M3_MAX).to(torch.float8_e4m3fn)


def _pack_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the even one low: [..., n] -> [..., n / 2], uint8."""
    codes = _e2m1_magnitude_codes(scaled) + 8 * torch.signbit(scaled)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low + 16 * high).to(torch.uint8)


def _fp8_sf(amax: torch.Tensor) -> torch.Tensor:
    return _ceil_power_of_two_(amax.clamp_(min=MIN_FP8_AMAX).div_(E4M3_MAX))


def _fp4_sf(amax: torch.Tensor) -> torch.Tensor:
    return _ceil_power_of_two_(amax.clamp_(min=MIN_FP4_AMAX).div_(E2M1_MAX))


def _ceil_power_of_two_(x: torch.Tensor) -> torch.Tensor:
    """``2 ** ceil(log2(x))`` of positive normal fp32 numbers, in place: the mantissa carries into the exponent."""
    return x.view(torch.int32).add_(0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32)


def _e8m0_encode(power_of_two: torch.Tensor) -> torch.Tensor:
    return (power_of_two.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value, ties to the even code, saturating at +-6."""
    return torch.copysign(_e2m1_pairs(x.device)[: len(E2M1_VALUES), 0][_e2m1_magnitude_codes(x)], x)


def _e2m1_magnitude_codes(x: torch.Tensor) -> torch.Tensor:
    """Code 0..7 of the magnitude, int64."""
    return torch.bucketize(x.abs(), _e2m1_boundaries(x.device))


@cache
def _e2m1_boundaries(device: torch.device) -> torch.Tensor:
    """The largest magnitude that rounds to each of the codes 0..6: the midpoint, or the fp32 number before it on a tie
    that goes up (below an odd code)."""
    midpoints = torch.tensor([(a + b) / 2 for a, b in zip(E2M1_VALUES, E2M1_VALUES[1:], strict=False)])
    before = torch.nextafter(midpoints, torch.zeros(()))
    return torch.where(torch.arange(len(midpoints)) % 2 == 0, midpoints, before).to(device)


@cache
def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """[256, 2]: the two values that a packed byte holds, low nibble first."""
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).to(device)


def _grouped(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _spread_blocks(blocks: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    return blocks.repeat_interleave(BLOCK_SIZE, 0)[:num_rows].repeat_interleave(BLOCK_SIZE, 1)[:, :num_columns]


def _check_groups(subject: str, x: torch.Tensor, size: int) -> None:
    if not x.dim() or x.shape[-1] % size:
        raise ValueError(f"{subject}: the last dimension must be a multiple of {size}, got {_describe(x)}")


def _describe(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
