"""One V4.1 layer: attention and mixture of experts, each between hyper-connections, and Engram before some."""

import torch
from torch import nn

from deepinfer_plugin.model_executor.caches.metadata import Step
from deepinfer_plugin.model_executor.layers.attention import Attention
from deepinfer_plugin.model_executor.layers.compressor import Compressor
from deepinfer_plugin.model_executor.layers.engram import Engram
from deepinfer_plugin.model_executor.layers.hyper_connection import HyperConnection, StreamState
from deepinfer_plugin.model_executor.layers.indexer import Selection
from deepinfer_plugin.model_executor.layers.moe import MoE
from deepinfer_plugin.model_executor.layers.rotary import Rotation
from deepinfer_plugin.model_executor.layers.rounding import Rounding
from deepinfer_plugin.model_executor.models.shape import ModelShape


class DecoderLayer(nn.Module):
    """Sub-modules: `engram` (some layers), `attn_hc`, `attn`, `ffn_hc`, `ffn`."""

    def __init__(
        self,
        shape: ModelShape,
        layer: int,
        compressors: dict[int, Compressor],
        dtype: torch.dtype,
        rounding: Rounding,
        expert_parallel: bool,
        packed: bool,
        prefix: str,
    ) -> None:
        super().__init__()
        self.has_engram = layer in shape.engram_layer_ids
        if self.has_engram:
            self.engram = Engram(shape, layer, dtype, packed, f"{prefix}.engram")
        self.attn_hc, self.ffn_hc = (HyperConnection(shape, dtype, rounding.activations) for _ in range(2))
        self.attn = Attention(shape, layer, compressors, dtype, rounding, packed, f"{prefix}.attn")
        self.ffn = MoE(shape, expert_parallel, rounding.activations, packed, f"{prefix}.ffn")

    def forward(
        self,
        state: StreamState,
        step: Step | None,
        rotation: Rotation,
        selection: Selection,
        class_ids: torch.Tensor,
        is_image: torch.Tensor,
        features: list[torch.Tensor] | None = None,
    ) -> None:
        """Advance `state` by one layer; append the mean of the streams that enter its attention to `features`."""
        if self.has_engram:
            state.streams = self.engram(state.mixed(), class_ids, is_image)
        hidden_states, rounded, coefficients = self.attn_hc.before(state)
        if features is not None:
            features.append(state.mean())
        self.attn_hc.after(state, self.attn(hidden_states, rounded, step, rotation, selection), coefficients)
        hidden_states, rounded, coefficients = self.ffn_hc.before(state)
        self.ffn_hc.after(
            state, self.ffn(hidden_states, rounded, is_image, None if step is None else step.is_padding), coefficients
        )
