"""Every name and signature of vLLM that we rely on. Runs against each supported version."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

from deepinfer_plugin import install

ROOT = Path(__file__).parents[2]
FLOORS = ("kernels", "model_executor", "spec_decode", "deepinfer_plugin")


def names() -> list[tuple[str, str]]:
    """(module, name) of every import from vLLM in our code, those inside functions too."""
    found = set()
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                    found |= {(node.module or "", alias.name) for alias in node.names}
    return sorted(found)


@pytest.mark.parametrize(("module", "name"), names(), ids=".".join)
def test_the_name_is_where_we_import_it_from(module, name):
    found = import_module(module)
    if not hasattr(found, name):
        import_module(f"{module}.{name}")


# what we call or override -> the parameters that we give, or that vLLM gives us
SIGNATURES = {
    "vllm.model_executor.models:ModelRegistry.register_model": ("model_arch", "model_cls"),
    "vllm.model_executor.models.config:VerifyAndUpdateConfig.verify_and_update_config": ("vllm_config",),
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.get_kv_cache_spec": ("self", "vllm_config"),
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.get_attn_backend": ("self",),
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.bind_kv_cache": ("self", "kv_cache"),
    "vllm.v1.attention.backend:AttentionMetadataBuilder.__init__": (
        "self",
        "kv_cache_spec",
        "layer_names",
        "vllm_config",
        "device",
    ),
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build": (
        "self",
        "common_prefix_len",
        "common_attn_metadata",
        "fast_build",
    ),
    "vllm.model_executor.layers.quantization.base_config:QuantizationConfig.override_quantization_method": (
        "hf_quant_cfg",
        "user_quant",
        "hf_config",
    ),
    "vllm.model_executor.layers.logits_processor:LogitsProcessor.forward": ("self", "lm_head", "hidden_states"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample": ("self", "logits", "spec_decode_metadata"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": ("self", "scheduler_output"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._input_fits_in_drafter": ("self", "common_attn_metadata"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": (
        "self",
        "scheduler_output",
        "intermediate_tensors",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids": (
        "self",
        "scheduler_output",
        "sampled_token_ids",
        "sampling_metadata",
        "hidden_states",
        "sample_hidden_states",
        "aux_hidden_states",
        "spec_decode_metadata",
        "common_attn_metadata",
        "slot_mappings",
    ),
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device": ("self",),
    "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model": ("self",),
    "vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes": ("kv_cache_config", "vllm_config"),
    "vllm.v1.attention.backends.utils:resolve_kv_cache_layout": (
        "vllm_config",
        "supported_layouts",
        "kv_cache_specs",
    ),
}


@pytest.mark.parametrize("target", SIGNATURES)
def test_the_parameters_are_those_we_know(target):
    module, _, path = target.partition(":")
    found = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    parameters = tuple(inspect.signature(found).parameters)
    assert parameters[: len(SIGNATURES[target])] == SIGNATURES[target]


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (
            "SlidingWindowMLASpec",
            {"block_size", "num_kv_heads", "head_size", "dtype", "sliding_window", "max_tp_shards"},
        ),
        ("MLAAttentionSpec", {"block_size", "num_kv_heads", "head_size", "dtype", "tokens_per_state", "max_tp_shards"}),
    ],
)
def test_the_cache_specs_have_our_fields(spec, fields):
    from vllm.v1 import kv_cache_interface

    assert fields <= getattr(kv_cache_interface, spec).__dataclass_fields__.keys()


def test_step_metadata_has_the_tensors_that_we_pass_on():
    from vllm.v1.attention.backend import CommonAttentionMetadata

    assert {"block_table_tensor", "query_start_loc"} <= CommonAttentionMetadata.__dataclass_fields__.keys()


def test_the_tables_that_we_enter_have_entries_for_v41():
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    assert MODELS_CONFIG_MAP[install.ARCH].is_deepinfer


def test_vllm_has_chat_rendering_tools_and_reasoning_for_v41():
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert ReasoningParserManager.get_reasoning_parser("deepseek_v41")
    assert ToolParserManager.get_tool_parser("deepseek_v41")
