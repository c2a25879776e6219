"""Quantise and decode at once: the roundings that V4.1 was trained with, where nothing is stored packed.

`quant_formats` holds the definitions and says what each rounds to.
"""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

FP8_TABLE = Dispatch(__name__, "round_fp8", cpu="reference", nvidia="triton_nvidia")
FP4_INDEX_TABLE = Dispatch(__name__, "round_fp4_index", cpu="reference", nvidia="triton_nvidia")
FP4_KV_TABLE = Dispatch(__name__, "round_fp4_kv", cpu="reference", nvidia="triton_nvidia")


def round_fp8(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with a power-of-two scale per 32 channels: inputs of FP8 and FP4 products, local KV.

    Args:
        x: [..., C], bf16 or fp32, C a multiple of 32.

    Returns:
        A new tensor of the shape and dtype of `x`; exact in bf16.

    Raises:
        ValueError: C not a multiple of 32.

    Source: model specification, section 4.3 (`fq8`).
    """
    _check("round_fp8", x, 32)
    return FP8_TABLE(x)


def round_fp4_index(x: torch.Tensor) -> torch.Tensor:
    """E2M1 with a power-of-two scale per 32 channels: queries and keys of the indexer.

    Args, returns and raises as `round_fp8`. Source: model specification, section 4.3 (`fq4i`).
    """
    _check("round_fp4_index", x, 32)
    return FP4_INDEX_TABLE(x)


def round_fp4_kv(x: torch.Tensor) -> torch.Tensor:
    """E2M1 with an E4M3 scale per 16 channels: compressed KV.

    Args, returns and raises as `round_fp8`, with groups of 16. Source: model specification, section 4.3 (`fq4k`).
    """
    _check("round_fp4_kv", x, 16)
    return FP4_KV_TABLE(x)


def _check(op: str, x: torch.Tensor, group_size: int) -> None:
    if not x.dim() or x.shape[-1] % group_size:
        raise ValueError(f"{op}: the last dimension must be a multiple of {group_size}, got {tuple(x.shape)}")
