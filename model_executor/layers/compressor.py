"""The compressor of a KV-source layer: pools tokens into entries of global memory, written with their index keys."""

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from deepinfer_plugin.kernels.compress_kv import compress_kv
from deepinfer_plugin.kernels.linear import linear
from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.model_executor.caches.layers import compressed_cache, sliding_cache
from deepinfer_plugin.model_executor.caches.metadata import Step
from deepinfer_plugin.model_executor.layers.linear import LinearFormat, weight_dtype
from deepinfer_plugin.model_executor.layers.rotary import Rotation
from deepinfer_plugin.model_executor.layers.rounding import Rounding
from deepinfer_plugin.model_executor.models.shape import ModelShape


class Compressor(nn.Module):
    """Weights: `wkv`, with ratio 2 also `wgate`, and `norm`; for the index keys `wk` and `k_norm`.

    Owns the compressed entries, the index keys, and with ratio 2 the open group's carry. Replicated over ranks.
    Source: model specification, section 2.5.
    """

    def __init__(
        self, shape: ModelShape, layer: int, dtype: torch.dtype, rounding: Rounding, packed: bool, prefix: str
    ) -> None:
        super().__init__()
        d, width = shape.head_dim, shape.index_head_dim
        self.ratio, self.eps = shape.ratio(layer), shape.rms_norm_eps
        self.has_gate = self.ratio > 1
        dense = LinearFormat(is_fp8=False, out_dtype=torch.float32, packed=packed)
        self.wkv = ReplicatedLinear(
            shape.hidden_size, d * (2 if self.has_gate else 1), bias=False, quant_config=dense, return_bias=False
        )
        self.norm = nn.Parameter(torch.empty(d, dtype=dtype), requires_grad=False)
        self.wk = nn.Parameter(torch.empty(width, d, dtype=weight_dtype(packed)), requires_grad=False)
        self.k_norm = nn.Parameter(torch.empty(width, dtype=dtype), requires_grad=False)
        self.entries, self.index_keys = (
            compressed_cache(
                *(f"{prefix}.{name}", size, self.ratio, dtype, rounding.record(packed)),
                rounding.before_the_store(packed),
            )
            for name, size, packed in (("entries", d, Record.FP4_KV), ("index_keys", width, Record.FP4_INDEX))
        )
        if self.has_gate:
            self.carry = sliding_cache(f"{prefix}.carry", 2 * d, self.ratio, torch.float32, blocks_per_block=4)

    def forward(self, hidden_states: torch.Tensor, step: Step, rotation: Rotation) -> None:
        """Write the entries that this step's rows complete. hidden_states: [num_tokens, hidden_size]."""
        latent = self._latent(hidden_states, step)
        cos_sin = rotation.entry[self.ratio]
        slots = step.slots(self.entries, self.ratio)
        self.entries.store_key(latent, None, self.eps, cos_sin, slots)
        key = linear(latent, self.wk, latent.dtype)
        self.index_keys.store_key(key, self.k_norm, self.eps, cos_sin, slots)

    def _latent(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        """The pooled and normalised latent of the group that ends with each row: [num_tokens, head_dim]."""
        value_score = self.wkv(hidden_states)  # fp32
        dtype = hidden_states.dtype
        if not self.has_gate:
            return compress_kv(value_score, None, None, self.norm, self.eps, dtype)
        # the partner comes from the cache even when it is a row of this step: one path for every chunking
        self.carry.store(value_score, step.slots(self.carry))
        previous = step.pages(self.carry).gather_states(step.positions - 1)
        value, score = value_score.chunk(2, dim=1)
        return compress_kv(value, score, previous, self.norm, self.eps, dtype)
