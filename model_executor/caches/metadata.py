"""What a step must know to use the caches: vLLM's builder passes tensors on, and the device does the arithmetic."""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheSpec

from deepinfer_plugin.kernels.cache_slots import cache_slots
from deepinfer_plugin.kernels.paged import Pages


@dataclass
class CacheMetadata(AttentionMetadata):
    """One KV-cache group in one step.

    block_table: [num_reqs, max_blocks] int32; query_start_loc: [num_reqs + 1] int32.
    """

    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    block_size: int


class CacheMetadataBuilder(AttentionMetadataBuilder[CacheMetadata]):
    """Builds `CacheMetadata`; the same for every cache of ours."""

    _cudagraph_support = AttentionCGSupport.ALWAYS  # everything a step needs is computed on the device

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CacheMetadata:
        common = common_attn_metadata
        return CacheMetadata(common.block_table_tensor, common.query_start_loc, self.kv_cache_spec.block_size)


class CacheBackend(AttentionBackend):
    """The attention backend that vLLM finds behind our cache layers: a metadata builder and a memory layout."""

    supported_dtypes = [torch.float32, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        return "DEEPINFER"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("DEEPINFER: V4.1's layers run their attention themselves, there is no AttentionImpl")

    @staticmethod
    def get_builder_cls() -> type[CacheMetadataBuilder]:
        return CacheMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # every op's contract: a row's result does not depend on the other rows

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # block-outermost: caches of different record sizes keep the same block size, so prefix hits stay fine-grained
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)


@dataclass
class Step:
    """The rows of one step: who they belong to, where they stand, and where their cache slots are.

    positions: [num_tokens] int64, the row's token index in its request; -1 marks a padding row.
    request_ids: [num_tokens] int64, the row's request in the block tables (0 for padding rows).
    """

    positions: torch.Tensor
    request_ids: torch.Tensor
    metadata: dict[str, CacheMetadata]
    _computed: dict[tuple[str | int, ...], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def current(cls, positions: torch.Tensor) -> "Step | None":
        """The step that runs now; None in profiling and warm-up runs, which own no cache.

        Args:
            positions: [num_tokens] int64 as vLLM hands them to the model; padding rows may hold anything.
        """
        metadata = get_forward_context().attn_metadata
        if not metadata:
            return None
        if not isinstance(metadata, dict):
            raise NotImplementedError(
                "V4.1: micro-batches (dual-batch overlap) are not built; run without --enable-dbo"
            )
        query_start_loc = next(iter(metadata.values())).query_start_loc
        rows = torch.arange(positions.shape[0], device=positions.device, dtype=query_start_loc.dtype)
        request_ids = torch.searchsorted(query_start_loc[1:].contiguous(), rows, right=True)
        is_padding = rows >= query_start_loc[-1]
        return cls(positions.masked_fill(is_padding, -1), request_ids.masked_fill(is_padding, 0), metadata)

    @property
    def is_padding(self) -> torch.Tensor:
        """[num_tokens] bool."""
        if ("padding",) not in self._computed:
            self._computed["padding",] = self.positions < 0
        return self._computed["padding",]

    def pages(self, cache: "Any") -> Pages:
        """`cache` as this step's rows see it."""
        return Pages(cache.kv_cache, self.metadata[cache.prefix].block_table, self.request_ids, cache.record)

    def slots(self, cache: "Any", ratio: int = 1) -> torch.Tensor:
        """Where this step's rows write in `cache`: [num_tokens] int64.

        With `ratio` 2 only the row that completes a group writes, at the group's entry; -1 elsewhere.
        """
        block_table = self.metadata[cache.prefix].block_table
        # caches of one group share their block table
        key = ("slots", id(block_table), cache.kv_cache.shape[1], ratio)
        if key not in self._computed:
            self._computed[key] = cache_slots(self.pages(cache), self.entries(ratio))
        return self._computed[key]

    def entries(self, ratio: int) -> torch.Tensor:
        """The compressed entry that each row completes, -1 for none: [num_tokens] int64."""
        if ratio == 1:
            return self.positions
        key = ("entries", ratio)
        if key not in self._computed:
            closes = (self.positions + 1) % ratio == 0
            # a padding row has position -1: (-1 + 1) % ratio == 0, and -1 // ratio is -1
            self._computed[key] = torch.where(closes, self.positions // ratio, -1)
        return self._computed[key]

    def num_visible(self, ratio: int) -> torch.Tensor:
        """Compressed entries a row may see, its own completed group included: floor((p + 1) / ratio), [num_tokens]."""
        key = ("visible", ratio)
        if key not in self._computed:
            self._computed[key] = (self.positions + 1) // ratio
        return self._computed[key]
