"""The indexer of a Full or Reindex layer: which entries of global memory each row attends to."""

from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from deepinfer_plugin.kernels.fake_quant import round_fp4_index
from deepinfer_plugin.kernels.index_topk import index_topk, index_topk_with_candidates
from deepinfer_plugin.kernels.linear import linear
from deepinfer_plugin.kernels.rope import rope
from deepinfer_plugin.model_executor.caches.metadata import Step
from deepinfer_plugin.model_executor.layers.compressor import Compressor
from deepinfer_plugin.model_executor.layers.linear import LinearFormat, weight_dtype
from deepinfer_plugin.model_executor.layers.rotary import Rotation
from deepinfer_plugin.model_executor.layers.rounding import Rounding
from deepinfer_plugin.model_executor.models.shape import ModelShape


@dataclass
class Selection:
    """What the last indexer chose, for the layers behind it.

    entries: int32 [num_tokens, index_topk], ascending, -1 padded; candidate_blocks: int32
    [num_tokens, candidate_topk_blocks], set by the candidate source.
    """

    entries: torch.Tensor | None = None
    candidate_blocks: torch.Tensor | None = None


class Indexer(nn.Module):
    """Weights: `wq_b` (FP8) and `weights_proj`. Replicated over ranks. Source: model specification, section 2.6."""

    def __init__(
        self, shape: ModelShape, layer: int, source: Compressor, rounding: Rounding, packed: bool, prefix: str
    ) -> None:
        super().__init__()
        heads, width = shape.index_n_heads, shape.index_head_dim
        self.num_heads, self.head_dim, self.topk = heads, width, shape.index_topk
        self.ratio, self.kv_rounding = shape.ratio(layer), rounding.kv
        self.publishes = layer == shape.candidate_source_layer_id
        self.restricted = shape.searches_candidates(layer)
        self.num_blocks, self.block_size = shape.candidate_topk_blocks, shape.candidate_block_size
        self.wq_b = ReplicatedLinear(
            shape.q_lora_rank,
            heads * width,
            bias=False,
            quant_config=LinearFormat(is_fp8=True, packed=packed),
            prefix=f"{prefix}.wq_b",
            return_bias=False,
        )
        weights = torch.empty(heads, shape.hidden_size, dtype=weight_dtype(packed))
        self.weights_proj = nn.Parameter(weights, requires_grad=False)
        self._source = (source,)  # a tuple: the source is another layer's module, not a child of this one

    def forward(
        self,
        query_latent: torch.Tensor,
        hidden_states: torch.Tensor,
        step: Step,
        rotation: Rotation,
        selection: Selection,
    ) -> None:
        """Set `selection.entries`, and on the candidate source `selection.candidate_blocks`.

        query_latent: [num_tokens, q_lora_rank], rounded for a product; hidden_states: [num_tokens, hidden_size].
        """
        query = self.wq_b(query_latent).view(-1, self.num_heads, self.head_dim)
        query = rope(query, rotation.scaled)
        if self.kv_rounding:
            query = round_fp4_index(query)
        head_weights = linear(hidden_states, self.weights_proj, hidden_states.dtype)
        keys, num_visible = step.pages(self._source[0].index_keys), step.num_visible(self.ratio)
        if self.publishes:
            selection.entries, selection.candidate_blocks = index_topk_with_candidates(
                query, head_weights, keys, num_visible, self.topk, self.num_blocks, self.block_size
            )
        else:
            blocks = selection.candidate_blocks if self.restricted else None
            selection.entries = index_topk(query, head_weights, keys, num_visible, self.topk, blocks, self.block_size)
