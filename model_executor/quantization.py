"""V4.1's checkpoint format as a vLLM quantisation method, so that vLLM accepts it on every platform and dtype.

Layers do not ask this class how to store their weights: `layers/linear.py` says so for each.
"""

from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from deepinfer_plugin.model_executor.models.shape import MODEL_TYPE

NAME = "deepinfer"


class DeepInferQuantization(QuantizationConfig):
    """FP8 32x32 linears and FP4 experts with UE8M0 factors, decoded by the plugin's own loaders."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DeepInferQuantization":
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        # vLLM hands the target's method on to the draft blocks, whose configuration has another type for a while
        is_ours = user_quant == NAME or getattr(hf_config, "model_type", None) == MODEL_TYPE
        return NAME if is_ours else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return None


def register_quantization() -> None:
    """Make the method known to vLLM. May run again."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(DeepInferQuantization)
