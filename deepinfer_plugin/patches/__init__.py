"""The complete list of what we replace inside vLLM. A name of vLLM's that is not here is not touched."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any, Literal

from vllm.logger import init_logger

from deepinfer_plugin.patches import dspark_speculator, sampling_limits, verify_budget

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True)
class Patch:
    target: str  # "module:name" or "module:Class.name", the place where vLLM looks the name up
    wrap: Callable[[Any], Any]  # original -> replacement; calls the original when our feature is off
    process: Literal["any", "engine", "worker"]
    expects: tuple[str, ...]  # parameter names of the original, checked before it is replaced
    why: str
    remove_when: str


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="vllm.sampling_params:SamplingParams._validate_spec_decode",
        wrap=sampling_limits.wrap,
        process="any",
        expects=("self", "speculative_config"),
        why="min_p and logit_bias act on DSpark's drafts as on the target",
        remove_when="vLLM lets a proposer say which sampling parameters it follows",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:init_speculator",
        wrap=dspark_speculator.wrap,
        process="worker",
        expects=("vllm_config", "device", "req_states"),
        why="V4.1's drafts come from our draft network",
        remove_when="vLLM takes a speculator's class from its configuration",
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.adaptive_verification:_assign_draft_token_budget_compiled",
        wrap=verify_budget.wrap,
        process="worker",
        expects=("confidence_probs", "idx_mapping", "capacities", "draft_budget", "num_steps"),
        why="of drafts with equal confidences always the same ones are verified",
        remove_when="vLLM's split has a fixed order of equals",
    ),
)


def place(patch: Patch) -> tuple[Any, str]:
    """The object that holds the name, None if vLLM has moved it, and the name."""
    module_name, _, path = patch.target.partition(":")
    *owners, name = path.split(".")
    holder: Any = import_module(module_name)
    for owner in owners:
        holder = getattr(holder, owner, None)
    return holder, name


def is_applied(patch: Patch) -> bool:
    holder, name = place(patch)
    return getattr(getattr(holder, name, None), "_patched_by", None) == __name__


def apply(process: str, patches: tuple[Patch, ...] = PATCHES) -> None:
    """Install this process's patches; calling again does nothing. Raises RuntimeError if vLLM has moved."""
    for patch in (p for p in patches if p.process == process):
        holder, name = place(patch)
        original = getattr(holder, name, None)
        if is_applied(patch):
            continue
        found = tuple(signature(original).parameters) if callable(original) else None
        if found != patch.expects:
            raise RuntimeError(f"cannot patch {patch.target}: it takes {found}, we know it with {patch.expects}")
        replacement = patch.wrap(original)
        replacement._patched_by = __name__
        setattr(holder, name, replacement)
        logger.info("deepinfer: patched %s (%s)", patch.target, patch.why)
