"""The definition of `store_kv_cache`: what every other module of this folder must equal."""

import torch

from deepinfer_plugin.kernels.records import Record


def store_kv_cache(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, record: Record) -> None:
    stored = slots >= 0
    rows, slots = record.encode(rows[stored]).to(cache.dtype), slots[stored]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows
