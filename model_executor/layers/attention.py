"""V4.1 attention: a sliding window of local keys and the selected entries of global memory, under one softmax."""

import torch
from vllm.model_executor.layers.linear import ReplicatedLinear

from deepinfer_plugin.kernels.rms_norm import rms_norm
from deepinfer_plugin.kernels.rope import rope
from deepinfer_plugin.kernels.sparse_attention import sparse_attention
from deepinfer_plugin.kernels.streams import beside, join
from deepinfer_plugin.model_executor.caches.metadata import Step
from deepinfer_plugin.model_executor.layers.attention_core import AttentionCore
from deepinfer_plugin.model_executor.layers.compressor import Compressor
from deepinfer_plugin.model_executor.layers.indexer import Indexer, Selection
from deepinfer_plugin.model_executor.layers.linear import LinearFormat
from deepinfer_plugin.model_executor.layers.rotary import Rotation
from deepinfer_plugin.model_executor.layers.rounding import Rounding
from deepinfer_plugin.model_executor.models.shape import ModelShape


class Attention(AttentionCore):
    """Weights: those of `AttentionCore`, and `wqkv_a` (wq_a and wkv of the checkpoint); compressor and indexer.

    All three are replicated over tensor-parallel ranks. Source: model specification, sections 2.4 and 2.7.
    """

    def __init__(
        self,
        shape: ModelShape,
        layer: int,
        compressors: dict[int, Compressor],
        dtype: torch.dtype,
        rounding: Rounding,
        packed: bool,
        prefix: str,
    ) -> None:
        super().__init__(shape, dtype, rounding, packed, prefix)
        self.ratio = shape.ratio(layer)
        self.wqkv_a = ReplicatedLinear(
            shape.hidden_size,
            shape.q_lora_rank + shape.head_dim,
            quant_config=LinearFormat(is_fp8=True, packed=packed),
            prefix=f"{prefix}.wqkv_a",
            bias=False,
            return_bias=False,
        )
        kind, source = shape.kind(layer), shape.kv_source(layer)
        if kind == "full":
            self.compressor = Compressor(shape, layer, dtype, rounding, packed, f"{prefix}.compressor")
            compressors[layer] = self.compressor
        # a tuple: the source is another layer's module, not a child of this one
        self._source = tuple([] if source is None else [compressors[source]])
        if kind in ("full", "reindex"):
            self.indexer = Indexer(shape, layer, self._source[0], rounding, packed, f"{prefix}.indexer")
        self.owns_entries, self.selects = kind == "full", kind in ("full", "reindex")

    def forward(
        self,
        hidden_states: torch.Tensor,
        rounded: torch.Tensor,
        step: Step | None,
        rotation: Rotation,
        selection: Selection,
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same in fp32, not rounded. rounded: the input for products.

        Without a step (profiling) the caches are neither read nor written.
        """
        cos_sin = rotation.of(self.ratio)
        query_latent, kv = self.wqkv_a(rounded).split((self.q_lora_rank, self.head_dim), dim=1)
        query_latent = rms_norm(query_latent, self.q_norm, self.eps, self.round_activations)
        with beside(kv.device):
            if step is not None:
                self.local_keys.store_key(kv, self.kv_norm, self.eps, cos_sin, step.slots(self.local_keys))
                if self.owns_entries:
                    self.compressor(hidden_states, step, rotation)
                if self.selects:
                    self.indexer(query_latent, hidden_states, step, rotation, selection)
        query = rope(self.wq_b(query_latent).view(-1, self.num_heads, self.head_dim), cos_sin)
        join(kv.device)

        attended = query
        if step is not None:
            attended = sparse_attention(
                query,
                step.pages(self.local_keys),
                step.positions,
                self.window,
                step.pages(self._source[0].entries) if self._source else None,
                selection.entries if self._source else None,
                self.attn_sink,
                self.scale,
            )
        return self.project(rope(attended, cos_sin, True, self.round_activations))
