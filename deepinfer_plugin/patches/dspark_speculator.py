"""vLLM's V2 runner builds its speculator by method; for V4.1's draft network it is ours."""

from collections.abc import Callable
from typing import Any

from deepinfer_plugin.config_hook import is_ours


def wrap(original: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if not is_ours(vllm_config.speculative_config):
            return original(vllm_config, device, req_states)
        from deepinfer_plugin.spec_decode.dspark.speculator_v2 import DSparkSpeculator

        return DSparkSpeculator(vllm_config, device)

    return init_speculator
