"""Weights in the checkpoint's own bytes, for targets whose kernels decode them while they multiply."""

from dataclasses import dataclass

import torch

from deepinfer_plugin.kernels.quant_formats import BLOCK_SIZE, decode_fp4, decode_fp8_blocks

# Kernels put 2**120 (E4M3) or 2**126 (E2M1) into a scale, to move a code's exponent to bf16's: it must stay finite.
# Downwards only values below 2**-126, bf16's smallest normal number, may lose bits.
MAX_FP8_SF_BYTE = 134  # a scale of 2**7
MAX_FP4_SF_BYTE = 128  # a scale of 2


@dataclass(frozen=True)
class Fp8Weight:
    """An FP8 linear: ``value[n, k] = e4m3(codes[n, k]) * 2 ** (sf[n // 32, k // 32] - 127)``.

    codes: [N, K], uint8; sf: [ceil(N / 32), ceil(K / 32)], uint8. K is a multiple of 32.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a scale beyond 2**7.
    """

    codes: torch.Tensor
    sf: torch.Tensor

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
        return decode_fp8_blocks(self.codes.view(torch.float8_e4m3fn), self.sf)


@dataclass(frozen=True)
class Fp4Weight:
    """FP4 experts: ``value[e, n, k] = e2m1(code) * 2 ** (sf[e, n, k // 32] - 127)``, two codes a byte, even k low.

    codes: [E, N, K / 2], uint8; sf: [E, N, K / 32], uint8.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """

    codes: torch.Tensor
    sf: torch.Tensor

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
        return decode_fp4(codes.flatten(0, 1), sf.flatten(0, 1)).view(len(codes), *self.shape[1:])


def _matrix(name: str, codes: torch.Tensor, sf: torch.Tensor) -> tuple[int, int]:
    if codes.dim() != 2 or codes.dtype != torch.uint8 or sf.dtype != torch.uint8:
        got = f"{tuple(codes.shape)} {codes.dtype} and {sf.dtype}"
        raise ValueError(f"{name}: codes must be a uint8 matrix and sf uint8, got {got}")
    return codes.shape[0], codes.shape[1]


def _check_scales(name: str, sf: torch.Tensor, largest: int) -> None:
    if sf.numel() and int(sf.max()) > largest:
        raise ValueError(f"{name}: scales must be at most 2**{largest - 127}, got 2**{int(sf.max()) - 127}")
