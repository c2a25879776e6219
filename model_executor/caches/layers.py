"""The caches of V4.1 as vLLM layers, each with its KV-cache spec. One physical memory, one layer; readers refer to it.

A cache holds packed records, or the exact values of the rounded rows in the model's dtype (model specification, section
4.4).
"""

from collections.abc import Callable

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

from deepinfer_plugin.kernels.norm_rope_store import norm_rope_store
from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.kernels.store_kv_cache import store_kv_cache
from deepinfer_plugin.model_executor.caches.metadata import CacheBackend


class PagedCache(nn.Module, AttentionLayerBase):
    """A cache that vLLM allocates, pages, shares by prefix and frees. vLLM binds `kv_cache` before the first step.

    kv_cache: [num_blocks, states_per_block, width], or records of that many bytes; the stride between blocks may be
    larger than a block.
    """

    def __init__(
        self, prefix: str, record: Record, rounded_as: Record, make_spec: Callable[[int], KVCacheSpec]
    ) -> None:
        super().__init__()
        self.prefix, self.record, self.rounded_as, self.make_spec = prefix, record, rounded_as, make_spec
        self.kv_cache = torch.tensor([])
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"cache: layer names must be unique, {prefix} is taken")
        layers[prefix] = self  # this is how vLLM finds the layer

    def get_attn_backend(self) -> type[CacheBackend]:
        return CacheBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return self.make_spec(vllm_config.cache_config.block_size)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache.squeeze(1)  # [num_blocks, 1 head, states, width] -> [num_blocks, states, width]

    def store_key(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Normalise, rotate and write rows [num_tokens, width], as `norm_rope_store` does."""
        norm_rope_store(x, norm_weight, eps, cos_sin, self.kv_cache, slots, self.record, self.rounded_as)

    def store(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows [num_tokens, width] to slots [num_tokens], -1 for none; into records, rounded."""
        store_kv_cache(rows, self.kv_cache, slots, self.record)


def sliding_cache(
    prefix: str,
    width: int,
    window: int,
    dtype: torch.dtype,
    record: Record = Record.PLAIN,
    rounded_as: Record = Record.PLAIN,
    blocks_per_block: int = 1,
) -> PagedCache:
    """A cache of one row of `width` per token, of which a request keeps the last `window`.

    blocks_per_block: cut vLLM's blocks, for wide rows, which would make every other cache's blocks as wide.

    Local KV (window 128), the open compression group (2 rows: the previous one and this), and the tokens that the
    next n-gram looks back to are all of this kind: recent past that prefix hits and preemption must restore.
    """
    size, dtype = record.num_bytes(width), dtype if record is Record.PLAIN else torch.uint8
    return PagedCache(
        prefix,
        record,
        rounded_as,
        lambda block_size: SlidingWindowMLASpec(
            block_size=max(1, block_size // blocks_per_block),
            num_kv_heads=1,
            head_size=size,
            dtype=dtype,
            sliding_window=window,
            max_tp_shards=1,
        ),
    )


def compressed_cache(
    prefix: str, width: int, ratio: int, dtype: torch.dtype, record: Record, rounded_as: Record
) -> PagedCache:
    """A cache of one row of `width` per `ratio` tokens, kept for the whole request."""
    size, dtype = record.num_bytes(width), dtype if record is Record.PLAIN else torch.uint8
    return PagedCache(
        prefix,
        record,
        rounded_as,
        lambda block_size: MLAAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=size, dtype=dtype, tokens_per_state=ratio, max_tp_shards=1
        ),
    )
