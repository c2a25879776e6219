"""The product's quantisers as steps of training: forward they round, backward they pass the gradient unchanged."""

from collections.abc import Callable
from typing import Any

import torch

from deepinfer_plugin.kernels.quant_formats import (
    decode_fp4,
    decode_fp8_blocks,
    decode_fp8_rows,
    encode_fp4,
    encode_fp8_blocks,
    encode_fp8_rows,
    round_fp4_index,
    round_fp4_kv,
    round_fp8,
)
from deepinfer_plugin.model_executor.models.checkpoint import Format

Rounder = Callable[[torch.Tensor], torch.Tensor]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, round: Rounder) -> torch.Tensor:
        return round(x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def straight_through(round: Rounder) -> Rounder:
    return lambda x: _StraightThrough.apply(x, round)


def _fp4(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.flatten(0, -2)  # factors belong to rows: stacked experts are one tall matrix
    return decode_fp4(*encode_fp4(flat)).view(weight.shape)


# what a stored weight can hold
WEIGHT: dict[Format, Rounder] = {
    Format.BF16: lambda weight: weight.bfloat16(),
    Format.F32: lambda weight: weight,
    Format.FP8_BLOCKS: lambda weight: decode_fp8_blocks(*encode_fp8_blocks(weight)),
    Format.FP8_ROWS: lambda rows: decode_fp8_rows(*encode_fp8_rows(rows)),
    Format.FP4: _fp4,
}
# what an operand or a cache entry can hold
ACTIVATION: dict[str, Rounder] = {
    "activation": round_fp8,
    "local_kv": round_fp8,
    "entry": round_fp4_kv,
    "index": round_fp4_index,
}
