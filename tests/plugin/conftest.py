"""vLLM with every plugin loaded, as at its start, and its tables put back after each test."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def plugins() -> Iterator[None]:
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    models, configs = dict(ModelRegistry.models), dict(MODELS_CONFIG_MAP)
    yield
    for table, saved in ((ModelRegistry.models, models), (MODELS_CONFIG_MAP, configs)):
        table.clear()
        table.update(saved)
