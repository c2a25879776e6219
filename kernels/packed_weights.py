"""Weights in as many bytes as the checkpoint's, for targets whose kernels decode them while they multiply.

A weight may be *interleaved*: the same bits in another order, with which a kernel decodes two codes in one or two
instructions, and in which what a thread has read is what it feeds to the tensor cores.

- A row's BLOCK = 128 channels are n = 16 words of eight codes: code p of word w is channel 16 p + w. So *phase* p, the
  codes p of all words, is 16 neighbouring channels, half of a group that shares a scale. What remains of a row comes in
  groups of 32 channels, with n = 4.
- Words come in pairs. In a 16-bit half of a pair lie codes of one word, the first word's in the lower halves, the
  second's in the higher ones: of an FP8 pair half j of a word holds phases 2 j and 2 j + 1, of an FP4 pair phases 4 j
  to 4 j + 3.

| half | bits 15 to 0 |
|---|---|
| FP8 | s0, m1[6:4], s1, m0[6:0], m1[3:0] |
| FP4 | s0, s3, m3[0], s1, m3[2:1], s2, m0[2:0], m1[2:0], m2[2:0] |

Where FP4 rows are whole blocks, an expert's scales are ordered by blocks, then rows, then the four groups of a block:
what a kernel reads at once, the scales of many rows, lies together.

s: the sign of a code, m: its other bits. A code then stands where bf16 has its fields, after at most one shift; m1's
upper bits and m3's parts take another.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepinfer_plugin.kernels.quant_formats import BLOCK_SIZE, decode_fp4, decode_fp8_blocks

# Kernels put 2**120 (E4M3) or 2**126 (E2M1) into a scale, to move a code's exponent to bf16's: it must stay finite.
# Downwards only values below 2**-126, bf16's smallest normal number, may lose bits.
MAX_FP8_SF_BYTE = 134  # a scale of 2**7
MAX_FP4_SF_BYTE = 128  # a scale of 2
ROWS_AT_ONCE = 4096  # of an FP8 weight that is interleaved in place
BLOCK, WORD = 128, 8  # channels


@dataclass(frozen=True)
class Fp8Weight:
    """An FP8 linear: ``value[n, k] = e4m3(codes[n, k]) * 2 ** (sf[n // 32, k // 32] - 127)``.

    codes: [N, K], uint8; sf: [ceil(N / 32), ceil(K / 32)], uint8. K is a multiple of 32. interleaved: of the codes.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a scale beyond 2**7.
    """

    codes: torch.Tensor
    sf: torch.Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        n, k = _matrix("Fp8Weight", self.codes, self.sf)
        if k % BLOCK_SIZE or self.sf.shape != (-(-n // BLOCK_SIZE), k // BLOCK_SIZE):
            got = f"codes {tuple(self.codes.shape)} and sf {tuple(self.sf.shape)}"
            raise ValueError(f"Fp8Weight: codes must be [N, 32n] with one scale per 32x32 block, got {got}")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def check_scales(self) -> None:
        """Raises ValueError: a scale that the kernels cannot hold. Waits for the device."""
        _check_scales("FP8 weight", self.sf, MAX_FP8_SF_BYTE)

    def decoded(self) -> torch.Tensor:
        """[N, K], fp32."""
        codes = fp8_in_order(self.codes) if self.interleaved else self.codes
        return decode_fp8_blocks(codes.view(torch.float8_e4m3fn), self.sf)

    def interleave(self, in_place: bool = False) -> "Fp8Weight":
        """This weight with interleaved codes; itself if they are. in_place: `codes` change, row by row."""
        return (
            self if self.interleaved else Fp8Weight(_interleave(self.codes, fp8_interleaved, in_place), self.sf, True)
        )


@dataclass(frozen=True)
class Fp4Weight:
    """FP4 experts: ``value[e, n, k] = e2m1(code) * 2 ** (sf[e, n, k // 32] - 127)``, two codes a byte, even k low.

    codes: [E, N, K / 2], uint8; sf: [E, N, K / 32], uint8. interleaved: of both.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """

    codes: torch.Tensor
    sf: torch.Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.codes.dim() != 3 or self.sf.shape != (*self.codes.shape[:2], 2 * self.codes.shape[2] // BLOCK_SIZE):
            got = f"codes {tuple(self.codes.shape)} and sf {tuple(self.sf.shape)}"
            raise ValueError(f"Fp4Weight: codes must be [E, N, 16n] and sf [E, N, n], got {got}")
        if self.codes.dtype != torch.uint8 or self.sf.dtype != torch.uint8:
            raise ValueError(f"Fp4Weight: codes and sf must be uint8, got {self.codes.dtype} and {self.sf.dtype}")

    @property
    def shape(self) -> torch.Size:
        """[E, N, K] of the values."""
        e, n, half = self.codes.shape
        return torch.Size((e, n, 2 * half))

    def check_scales(self) -> None:
        """Raises ValueError: a scale that the kernels cannot hold. Waits for the device."""
        _check_scales("FP4 weight", self.sf, MAX_FP4_SF_BYTE)

    def decoded(self, experts: torch.Tensor | None = None) -> torch.Tensor:
        """[E, N, K], fp32; or only these experts', in this order."""
        codes, sf = (self.codes, self.sf) if experts is None else (self.codes[experts], self.sf[experts])
        codes, sf = (fp4_in_order(codes), scales_in_order(sf)) if self.interleaved else (codes, sf)
        return decode_fp4(codes.flatten(0, 1), sf.flatten(0, 1)).view(len(codes), *self.shape[1:])

    def interleave(self, in_place: bool = False) -> "Fp4Weight":
        """This weight interleaved; itself if it is. in_place: `codes` and `sf` change, expert by expert."""
        if self.interleaved:
            return self
        codes, sf = _interleave(self.codes, fp4_interleaved, in_place), _interleave(self.sf, scales_by_block, in_place)
        return Fp4Weight(codes, sf, True)


def fp8_interleaved(codes: torch.Tensor) -> torch.Tensor:
    """[..., K] uint8 -> the same, every block of 128 bytes, or group of 32 behind the last, interleaved."""
    return _by_blocks(codes, lambda words: _to_bytes(_fp8_halves(words)))


def fp8_in_order(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `fp8_interleaved`."""
    return _by_blocks_in_order(codes, 1, _fp8_codes)


def fp4_interleaved(codes: torch.Tensor) -> torch.Tensor:
    """[..., K / 2] uint8 -> the same, every block of 64 bytes, or group of 16 behind the last, interleaved."""
    return _by_blocks(_nibbles(codes), lambda words: _to_bytes(_fp4_halves(words)))


def fp4_in_order(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `fp4_interleaved`."""
    low, high = _by_blocks_in_order(codes, 2, _fp4_codes).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def scales_by_block(sf: torch.Tensor) -> torch.Tensor:
    """[..., N, K / 32] -> the same shape, block by block; as it is where K is not whole blocks."""
    groups = BLOCK // BLOCK_SIZE
    if sf.shape[-1] % groups:
        return sf
    return sf.unflatten(-1, (-1, groups)).transpose(-2, -3).reshape(sf.shape)


def scales_in_order(sf: torch.Tensor) -> torch.Tensor:
    """The inverse of `scales_by_block`."""
    groups = BLOCK // BLOCK_SIZE
    if sf.shape[-1] % groups:
        return sf
    by_block = sf.reshape(*sf.shape[:-2], sf.shape[-1] // groups, sf.shape[-2], groups)
    return by_block.transpose(-2, -3).reshape(sf.shape)


def _by_blocks(codes: torch.Tensor, to_bytes: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """[..., K] codes, one a byte -> bytes of interleaved words; `to_bytes` takes pairs of words, [..., 2, WORD]."""
    parts = []
    whole = codes.shape[-1] // BLOCK * BLOCK
    for part, channels in ((codes[..., :whole], BLOCK), (codes[..., whole:], BLOCK_SIZE)):
        words = part.unflatten(-1, (part.shape[-1] // channels, WORD, channels // WORD)).transpose(-1, -2)
        parts.append(to_bytes(words.unflatten(-2, (-1, 2)).int()).flatten(-3))
    return torch.cat(parts, dim=-1)


def _by_blocks_in_order(
    codes: torch.Tensor, codes_in_byte: int, to_codes: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The inverse of `_by_blocks`; `to_codes` takes halves, [..., 2, halves of a word]."""
    parts = []
    whole = codes.shape[-1] * codes_in_byte // BLOCK * BLOCK // codes_in_byte
    for part, channels in ((codes[..., :whole], BLOCK), (codes[..., whole:], BLOCK_SIZE)):
        size = channels // codes_in_byte
        pairs = part.unflatten(-1, (part.shape[-1] // size, channels // WORD // 2, 2 * WORD // codes_in_byte))
        words = to_codes(_from_bytes(pairs)).flatten(-3, -2)  # [..., blocks, words, WORD]
        parts.append(words.transpose(-1, -2).flatten(-3).to(torch.uint8))
    return torch.cat(parts, dim=-1)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 0x0F, codes >> 4), dim=-1).flatten(-2)


def _fp8_halves(words: torch.Tensor) -> torch.Tensor:
    """[..., 2, WORD] codes -> [..., 2, 4] halves."""
    first, second = words.unflatten(-1, (4, 2)).unbind(-1)
    half = ((first & 0x80) << 8) | ((first & 0x7F) << 4)
    return half | ((second & 0x70) << 8) | ((second & 0x80) << 4) | (second & 0x0F)


def _fp8_codes(half: torch.Tensor) -> torch.Tensor:
    first = ((half >> 8) & 0x80) | ((half >> 4) & 0x7F)
    second = ((half >> 8) & 0x70) | ((half >> 4) & 0x80) | (half & 0x0F)
    return torch.stack((first, second), dim=-1).flatten(-2)


def _fp4_halves(words: torch.Tensor) -> torch.Tensor:
    """[..., 2, WORD] codes -> [..., 2, 2] halves."""
    a, b, c, d = words.unflatten(-1, (2, 4)).unbind(-1)
    half = ((a & 8) << 12) | ((a & 7) << 6) | ((b & 8) << 9) | ((b & 7) << 3) | ((c & 8) << 6) | (c & 7)
    return half | ((d & 8) << 11) | ((d & 1) << 13) | ((d & 6) << 9)


def _fp4_codes(half: torch.Tensor) -> torch.Tensor:
    a, b = ((half >> 12) & 8) | ((half >> 6) & 7), ((half >> 9) & 8) | ((half >> 3) & 7)
    c = ((half >> 6) & 8) | (half & 7)
    d = ((half >> 11) & 8) | ((half >> 13) & 1) | ((half >> 9) & 6)
    return torch.stack((a, b, c, d), dim=-1).flatten(-2)


def _to_bytes(half: torch.Tensor) -> torch.Tensor:
    """[..., 2, halves] -> [..., 2 * WORD / codes in a byte]: of each half the first word's, then the second's."""
    half = half.transpose(-1, -2)
    return torch.stack((half & 0xFF, half >> 8), dim=-1).to(torch.uint8).flatten(-3)


def _from_bytes(pairs: torch.Tensor) -> torch.Tensor:
    low, high = pairs.unflatten(-1, (-1, 2, 2)).int().unbind(-1)
    return (low | (high << 8)).transpose(-1, -2)


def _interleave(codes: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], in_place: bool) -> torch.Tensor:
    if not in_place:
        return change(codes)
    for part in codes.split(ROWS_AT_ONCE) if codes.dim() == 2 else codes:
        part.copy_(change(part))
    return codes


def _matrix(name: str, codes: torch.Tensor, sf: torch.Tensor) -> tuple[int, int]:
    if codes.dim() != 2 or codes.dtype != torch.uint8 or sf.dtype != torch.uint8:
        got = f"{tuple(codes.shape)} {codes.dtype} and {sf.dtype}"
        raise ValueError(f"{name}: codes must be a uint8 matrix and sf uint8, got {got}")
    return codes.shape[0], codes.shape[1]


def _check_scales(name: str, sf: torch.Tensor, largest: int) -> None:
    if sf.numel() and int(sf.max()) > largest:
        raise ValueError(f"{name}: scales must be at most 2**{largest - 127}, got 2**{int(sf.max()) - 127}")
