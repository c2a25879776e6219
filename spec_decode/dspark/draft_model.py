"""The draft network: three window-only blocks over one drafted block of tokens, conditioned on the target's features.

It shares the target's embedding and head. Source: model specification, section 6.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear

from deepinfer_plugin.kernels.fake_quant import round_fp8
from deepinfer_plugin.kernels.rms_norm import rms_norm
from deepinfer_plugin.kernels.rope_table import rope_table
from deepinfer_plugin.model_executor.caches.metadata import Step
from deepinfer_plugin.model_executor.layers.hyper_connection import HyperConnection, StreamState
from deepinfer_plugin.model_executor.layers.linear import LinearFormat
from deepinfer_plugin.model_executor.layers.moe import MoE
from deepinfer_plugin.model_executor.layers.rounding import Rounding
from deepinfer_plugin.model_executor.models.build import BuildOptions
from deepinfer_plugin.model_executor.models.shape import ModelShape
from deepinfer_plugin.model_executor.models.weights import WeightLoader
from deepinfer_plugin.spec_decode.dspark.attention import Block, DraftAttention
from deepinfer_plugin.spec_decode.dspark.heads import ConfidenceHead, MarkovHead


class DraftBlock(nn.Module):
    """Sub-modules: `attn_hc`, `attn`, `ffn_hc`, `ffn`, as in a layer of the backbone."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        rounding: Rounding,
        expert_parallel: bool,
        packed: bool,
        prefix: str,
    ) -> None:
        super().__init__()
        experts = replace(
            shape,
            n_routed_experts=shape.dspark_n_routed_experts,
            num_experts_per_tok=shape.dspark_num_experts_per_tok,
        )
        self.attn_hc, self.ffn_hc = (HyperConnection(shape, dtype, rounding.activations) for _ in range(2))
        self.attn = DraftAttention(shape, dtype, rounding, packed, f"{prefix}.attn")
        self.ffn = MoE(experts, expert_parallel, rounding.activations, packed, f"{prefix}.ffn")

    def forward(self, state: StreamState, block: Block, is_image: torch.Tensor) -> None:
        """Advance `state` by one block."""
        _, rounded, coefficients = self.attn_hc.before(state)
        self.attn_hc.after(state, self.attn(rounded, block), coefficients)
        hidden_states, rounded, coefficients = self.ffn_hc.before(state)
        self.ffn_hc.after(state, self.ffn(hidden_states, rounded, is_image, block.step.is_padding), coefficients)


class DSparkV41DraftModel(nn.Module):
    """Weights: `mtp.*` of the checkpoint, under its names; merged where `models/weights.py` says so."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        shape = self.shape = ModelShape.from_hf_config(vllm_config.model_config.hf_config)
        build = BuildOptions.from_vllm(vllm_config)
        dtype, rounding, packed = build.dtype, build.rounding, build.packed
        self.round_activations = rounding.activations
        self.mtp = nn.ModuleList(
            DraftBlock(shape, dtype, rounding, build.expert_parallel, packed, f"mtp.{n}")
            for n in range(shape.num_nextn_predict_layers)
        )
        first, last = self.mtp[0], self.mtp[-1]
        first.main_proj = ReplicatedLinear(
            len(shape.dspark_target_layer_ids) * shape.hidden_size,
            shape.hidden_size,
            bias=False,
            return_bias=False,
            quant_config=LinearFormat(is_fp8=True, packed=packed),
            prefix="mtp.0.main_proj",
        )
        first.main_norm = nn.Parameter(torch.empty(shape.hidden_size, dtype=dtype), requires_grad=False)
        last.norm = nn.Parameter(torch.empty(shape.hidden_size, dtype=dtype), requires_grad=False)
        last.markov_head = MarkovHead(shape, dtype, packed, f"mtp.{len(self.mtp) - 1}.markov_head")
        last.confidence_head = ConfidenceHead(shape)
        # a block may reach past the last position that a request can have
        rows = vllm_config.model_config.max_model_len + shape.dspark_block_size
        table = rope_table(rows, shape.qk_rope_head_dim, shape.rope_theta, None, torch.get_default_device())
        self.register_buffer("rotation", table, persistent=False)

    def follow(self, target: nn.Module) -> None:
        """Take the target's embedding and head, and read its features in every forward of it."""
        self._target = (target,)  # a tuple: not a child of this module
        target.feature_reader = self.store_main_keys

    def store_main_keys(self, features: torch.Tensor, step: Step, cos_sin: torch.Tensor) -> None:
        """Write the keys of the rows that the target processes.

        Args:
            features: [num_tokens, targets * hidden_size], the mean of the streams before each target layer's attention.
            step: the target's; cos_sin: fp32 [num_tokens, qk_rope_head_dim], of window-only layers.
        """
        if self.round_activations:
            features = round_fp8(features)
        first, eps = self.mtp[0], self.shape.rms_norm_eps
        rounded = rms_norm(first.main_proj(features), first.main_norm, eps, self.round_activations)
        for block in self.mtp:
            block.attn.store_main_keys(rounded, step, cos_sin)

    def forward(self, input_ids: torch.Tensor, step: Step, anchors: torch.Tensor, length: int) -> torch.Tensor:
        """The hidden states before the norm, [num_tokens, hidden_size].

        Args:
            input_ids: int64 [num_tokens], `length` for each request: the token after its anchor, then noise.
            step: the rows' positions, requests, and the block tables of the draft blocks' caches.
            anchors: int64 [num_tokens], the last position that the target has processed of each row's request.
        """
        (target,) = self._target
        block = Block(step, anchors, length, self.rotation[step.positions.clamp(min=0)])
        state = StreamState.start(target.embed_input_ids(input_ids), self.shape.hc_mult)
        is_image = torch.zeros_like(input_ids, dtype=torch.bool)
        for layer in self.mtp:
            layer(state, block, is_image)
        return state.read()

    def base_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> fp32 [num_tokens, vocab_size], without the Markov head."""
        (target,) = self._target
        return target.compute_logits(rms_norm(hidden_states, self.mtp[-1].norm, self.shape.rms_norm_eps))

    def markov(
        self, base: torch.Tensor, hidden_states: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One place of every request: logits fp32 [n, vocab_size], and the logit of the confidence, fp32 [n].

        Args:
            base: fp32 [n, vocab_size] and hidden_states: [n, hidden_size], of that place.
            previous: int64 [n], the tokens before it.
        """
        last = self.mtp[-1]
        bias, before = last.markov_head(previous)
        return base + bias, last.confidence_head(hidden_states, before)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the parameters from checkpoint tensors in any order; return the parameters' names.

        Raises:
            ValueError: a tensor is missing, unknown, or of another shape or dtype.
        """
        return WeightLoader(self, self.shape, ("mtp.",)).load(weights)
