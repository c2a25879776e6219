"""`deepinfer-plugin doctor`: who would serve V4.1 on this machine, with what, and why not if we would not.

It asks vLLM itself: plugins are loaded as vLLM loads them, and a model is configured, down to its KV-cache groups.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from deepinfer_plugin.install import ARCH, MODEL_CLASS
from deepinfer_plugin.kernels.dispatch import tables
from deepinfer_plugin.kernels.target import current_target
from deepinfer_plugin.model_executor import vllm_compat

GROUP, ENTRY = "vllm.general_plugins", "deepinfer"
ARCHITECTURES = (ARCH, "DSparkV41DraftModel")


@dataclass
class Diagnosis:
    """problems: why V4.1 would not be served by us; empty when it would. Parts that a problem hides stay empty."""

    plugin: str = ""
    vllm_found: str = "none"
    vllm_supported: str = str(vllm_compat.SUPPORTED)
    entry_point: str = "none"
    architectures: dict[str, str] = field(default_factory=dict)
    device: str = ""
    kernels: dict[str, dict[str, str]] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    hooks: list[str] = field(default_factory=list)
    patches: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def diagnose(model: str | None = None) -> Diagnosis:
    """Look at this environment. model: folder or name whose configuration is asked; default: the tiny one."""
    found = Diagnosis(plugin=version("deepinfer-plugin"))
    found.kernels = {op: dict(zip(("module", "why"), table.chosen(), strict=True)) for op, table in tables().items()}
    for look in (_look_at_version, _look_at_entry_point, _look_at_registration):
        look(found)
        if found.problems:
            return found
    try:
        with _model_folder(model) as folder:
            found.cache = describe_cache(folder)
    except Exception as error:  # whatever vLLM raises here would stop its start too
        found.problems.append(f"configuration: {error}")
    return found


def _look_at_version(found: Diagnosis) -> None:
    try:
        found.vllm_found = vllm_compat.vllm_version()
        vllm_compat.check_version()
    except PackageNotFoundError:
        found.problems.append("vLLM is not installed in this environment")
    except RuntimeError as error:
        found.problems.append(str(error))


def _look_at_entry_point(found: Diagnosis) -> None:
    import vllm.envs as envs

    ours = entry_points(group=GROUP, name=ENTRY)
    if not ours:
        found.problems.append(f"entry point {ENTRY!r} of group {GROUP} not found: is deepinfer-plugin installed?")
        return
    found.entry_point = next(iter(ours)).value
    if envs.VLLM_PLUGINS is not None and ENTRY not in envs.VLLM_PLUGINS:
        found.problems.append(f"VLLM_PLUGINS leaves {ENTRY!r} out: it is {','.join(envs.VLLM_PLUGINS)!r}")


def _look_at_registration(found: Diagnosis) -> None:
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    try:
        load_general_plugins()
    except Exception as error:  # a plugin that raises stops vLLM's start, be it ours or another
        found.problems.append(f"a plugin stops vLLM's start: {error}")
        return
    from deepinfer_plugin.config_hook import hooks, owner
    from deepinfer_plugin.patches import PATCHES, is_applied

    found.device = f"{current_platform.device_type} ({current_platform.get_device_name()}), {current_target().value}"
    found.architectures = {arch: owner(arch) for arch in ARCHITECTURES}
    found.hooks = hooks()
    found.patches = [
        {
            "target": patch.target,
            "why": patch.why,
            "remove_when": patch.remove_when,
            "process": patch.process,
            "applied": is_applied(patch) if patch.process == "any" else None,  # None: in another process than this
        }
        for patch in PATCHES
    ]
    if (serves := found.architectures[ARCH]) != MODEL_CLASS:
        found.problems.append(f"{ARCH} would be served by {serves}, not by {MODEL_CLASS}")


@contextmanager
def _model_folder(model: str | None) -> Iterator[str]:
    if model is not None:
        yield model
        return
    from deepinfer_plugin.model_executor.models.tiny import write_tiny

    with tempfile.TemporaryDirectory(prefix="tiny-v41-") as folder:
        write_tiny(Path(folder))
        yield folder


def describe_cache(model: str) -> dict[str, Any]:
    """Block size and prefix-cache granularity that vLLM would use for `model` with its default flags.

    Builds the model without memory for its weights, on one rank, and asks vLLM to group its caches.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from deepinfer_plugin.model_executor.caches.metadata import CacheBackend
    from deepinfer_plugin.model_executor.models.deepseek_v41 import DeepseekV41ForCausalLM

    config = EngineArgs(model).create_engine_config()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend="gloo")
        try:
            ensure_model_parallel_initialized(1, 1)
            with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
                DeepseekV41ForCausalLM(vllm_config=config)
            layers = config.compilation_config.static_forward_context
            specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
            layouts = [layout.name for layout in CacheBackend.supported_kv_cache_layouts()]
            resolve_kv_cache_layout(config, [layouts], specs.values())
            groups = vllm_compat.get_kv_cache_groups(config, specs)
            granularity, _ = resolve_kv_cache_block_sizes(KVCacheConfig(1, [], groups), config)
        finally:
            cleanup_dist_env_and_memory()
    caching = config.cache_config.enable_prefix_caching
    return {
        "model": model,
        "block_size": config.cache_config.block_size,
        "groups": [describe_group(specs, group) for group in groups],
        "prefix_caching": caching,
        "prefix_hit_granularity": granularity if caching else None,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
    }


def describe_group(specs: dict[str, Any], group: Any) -> str:
    kinds = sorted({type(specs[name]).__name__ for name in group.layer_names})
    return f"{len(group.layer_names)} x {', '.join(kinds)}, blocks of {group.kv_cache_spec.block_size} tokens"


def as_text(found: Diagnosis) -> str:
    lines = [
        f"plugin         deepinfer-plugin {found.plugin}",
        f"vLLM           {found.vllm_found} (supported: {found.vllm_supported})",
        f"entry point    {found.entry_point}",
        f"device         {found.device}",
        "architectures",
        *(f"  {arch:24}{serves}" for arch, serves in found.architectures.items()),
        "kernels",
        *(f"  {op:28}{row['module']:16}{row['why']}" for op, row in found.kernels.items()),
        "cache",
        *(f"  {name:24}{value}" for name, value in found.cache.items() if name != "groups"),
        *(f"  group                   {group}" for group in found.cache.get("groups", ())),
        "changed in vLLM",
        *(f"  hook   {hook}" for hook in found.hooks),
        *(
            f"  patch  {patch['target']}{'' if patch['applied'] else ', in GPU workers'}: {patch['why']}"
            for patch in found.patches
            if patch["applied"] is not False
        ),
        "",
    ]
    lines += [f"PROBLEM: {problem}" for problem in found.problems] or [f"{ARCH} would be served by {MODEL_CLASS}."]
    return "\n".join(lines)


def run(model: str | None, as_json: bool, write: Callable[[str], Any]) -> int:
    """Write the diagnosis; return the exit status: 1 when V4.1 would not be served by us."""
    found = diagnose(model)
    write((json.dumps(asdict(found), indent=2) if as_json else as_text(found)) + "\n")
    return 1 if found.problems else 0
