"""vLLM refuses min_p and logit_bias wherever there is speculation; with DSpark's they are followed."""

from collections.abc import Callable
from typing import Any

from deepinfer_plugin.config_hook import is_ours


def wrap(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if speculative_config is None or not is_ours(speculative_config):
            original(self, speculative_config)

    return _validate_spec_decode
