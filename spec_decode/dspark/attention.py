"""Attention of a draft block: a window of the target's tokens, and the whole drafted block, later rows included."""

from dataclasses import dataclass, field

import torch
from vllm.model_executor.layers.linear import ReplicatedLinear

from deepinfer_plugin.kernels.norm_rope_store import norm_rope_store
from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.rms_norm import rms_norm
from deepinfer_plugin.kernels.rope import rope
from deepinfer_plugin.kernels.sparse_attention import sparse_attention
from deepinfer_plugin.model_executor.caches.metadata import Step
from deepinfer_plugin.model_executor.layers.attention_core import AttentionCore
from deepinfer_plugin.model_executor.layers.linear import LinearFormat
from deepinfer_plugin.model_executor.layers.rounding import Rounding
from deepinfer_plugin.model_executor.models.shape import ModelShape


@dataclass
class Block:
    """The rows of one round of drafting, `length` of them for each request, next to each other.

    step: whose positions are the drafted ones; anchors: int64 [num_tokens], the last position that the target has
    processed of each row's request; cos_sin: fp32 [num_tokens, qk_rope_head_dim], at the rows' positions.
    """

    step: Step
    anchors: torch.Tensor
    length: int
    cos_sin: torch.Tensor
    places: torch.Tensor = field(init=False)  # of the rows' own keys: int32 [num_tokens, length]
    rows: torch.Tensor = field(init=False)  # int64 [num_tokens], where each row's own key is stored

    def __post_init__(self) -> None:
        num_tokens, device = self.anchors.shape[0], self.anchors.device
        self.places = torch.arange(self.length, dtype=torch.int32, device=device).expand(num_tokens, -1)
        self.rows = torch.arange(num_tokens, device=device)


class DraftAttention(AttentionCore):
    """Weights: those of `AttentionCore`, and `wq_a`, `wkv`, which are replicated over tensor-parallel ranks.

    `local_keys` holds the keys of tokens that the target has processed (main keys), written during its forward. Keys of
    drafted tokens live for one round. Source: model specification, sections 6.2 and 6.3.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, rounding: Rounding, packed: bool, prefix: str) -> None:
        super().__init__(shape, dtype, rounding, packed, prefix)
        self.wq_a, self.wkv = (
            ReplicatedLinear(
                shape.hidden_size,
                width,
                bias=False,
                return_bias=False,
                quant_config=LinearFormat(is_fp8=True, packed=packed),
                prefix=f"{prefix}.{name}",
            )
            for name, width in (("wq_a", shape.q_lora_rank), ("wkv", shape.head_dim))
        )

    def store_main_keys(self, rounded: torch.Tensor, step: Step, cos_sin: torch.Tensor) -> None:
        """Keys of rows that the target is processing; rounded: [num_tokens, hidden_size], made of its features."""
        kv = self.wkv(rounded)
        self.local_keys.store_key(kv, self.kv_norm, self.eps, cos_sin, step.slots(self.local_keys))

    def forward(self, rounded: torch.Tensor, block: Block) -> torch.Tensor:
        """[num_tokens, hidden_size], rounded for a product -> the same in fp32, not rounded."""
        query_latent = rms_norm(self.wq_a(rounded), self.q_norm, self.eps, self.round_activations)
        query = rope(self.wq_b(query_latent).view(-1, self.num_heads, self.head_dim), block.cos_sin)
        window = block.step.pages(self.local_keys)
        attended = sparse_attention(
            query,
            window,
            block.anchors,
            self.window,
            self._drafted(self.wkv(rounded), block, window),
            block.places,
            self.attn_sink,
            self.scale,
        )
        return self.project(rope(attended, block.cos_sin, True, self.round_activations))

    def _drafted(self, kv: torch.Tensor, block: Block, window: Pages) -> Pages:
        """The keys of the block itself, as a cache of one page a request, in the format of the window's."""
        cache, requests = self.local_keys, kv.shape[0] // block.length
        keys = torch.empty(requests, block.length, window.cache.shape[2], dtype=window.cache.dtype, device=kv.device)
        norm_rope_store(kv, self.kv_norm, self.eps, block.cos_sin, keys, block.rows, cache.record, cache.rounded_as)
        table = torch.arange(requests, dtype=torch.int32, device=kv.device).unsqueeze(1)
        return Pages(keys, table, block.rows // block.length, cache.record)
