"""The definition of `norm_rope_store`: what every other module of this folder must equal."""

import torch

from deepinfer_plugin.kernels.quant_formats import round_fp4_index, round_fp4_kv, round_fp8
from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.kernels.rms_norm.reference import rms_norm
from deepinfer_plugin.kernels.rope.reference import rope
from deepinfer_plugin.kernels.store_kv_cache.reference import store_kv_cache


def norm_rope_store(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    record: Record,
    rounded_as: Record,
) -> None:
    rows = x if norm_weight is None else rms_norm(x, norm_weight, eps, False)
    rows = rope(rows.unsqueeze(1), cos_sin, False, False).squeeze(1)
    store_kv_cache(_rounded(rows, rounded_as), cache, slots, record)


def _rounded(rows: torch.Tensor, rounded_as: Record) -> torch.Tensor:
    if rounded_as is Record.FP8:
        return round_fp8(rows)
    if rounded_as is Record.FP4_KV:
        return round_fp4_kv(rows)
    return round_fp4_index(rows) if rounded_as is Record.FP4_INDEX else rows
