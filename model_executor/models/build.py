"""How this process builds V4.1's networks: dtype, roundings, and whether weights and caches stay packed."""

from dataclasses import dataclass

import torch
from vllm.config import VllmConfig

from deepinfer_plugin.kernels.target import current_target
from deepinfer_plugin.model_executor.config import DeepInferConfig
from deepinfer_plugin.model_executor.layers.rounding import Rounding


@dataclass(frozen=True)
class BuildOptions:
    """The same for the backbone and for the draft blocks.

    dtype: of states between layers; packed: weights keep the checkpoint's bytes; expert_parallel: ranks hold whole
    experts.
    """

    dtype: torch.dtype
    rounding: Rounding
    packed: bool
    expert_parallel: bool

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> "BuildOptions":
        ours, packs = DeepInferConfig.from_vllm(vllm_config), current_target().packs
        packed_kv = packs and ours.kv_rounding if ours.packed_kv is None else ours.packed_kv
        return cls(
            dtype=vllm_config.model_config.dtype,
            rounding=Rounding(activations=ours.activation_rounding, kv=ours.kv_rounding, packed_kv=packed_kv),
            packed=packs if ours.packed_weights is None else ours.packed_weights,
            expert_parallel=vllm_config.parallel_config.enable_expert_parallel,
        )
