"""The complete list of what we replace inside vLLM. A name of vLLM's that is not here is not touched."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any, Literal

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True)
class Patch:
    target: str  # "module:name", the place where vLLM looks the name up
    wrap: Callable[[Any], Any]  # original -> replacement; calls the original when our feature is off
    process: Literal["engine", "worker"]
    expects: tuple[str, ...]  # parameter names of the original, checked before it is replaced
    why: str
    remove_when: str


PATCHES: tuple[Patch, ...] = ()


def is_applied(patch: Patch) -> bool:
    module_name, _, name = patch.target.partition(":")
    return getattr(getattr(import_module(module_name), name, None), "_patched_by", None) == __name__


def apply(process: str, patches: tuple[Patch, ...] = PATCHES) -> None:
    """Install this process's patches; calling again does nothing. Raises RuntimeError if vLLM has moved."""
    for patch in (p for p in patches if p.process == process):
        module_name, _, name = patch.target.partition(":")
        module = import_module(module_name)
        original = getattr(module, name, None)
        if is_applied(patch):
            continue
        found = tuple(signature(original).parameters) if callable(original) else None
        if found != patch.expects:
            raise RuntimeError(f"cannot patch {patch.target}: it takes {found}, we know it with {patch.expects}")
        replacement = patch.wrap(original)
        replacement._patched_by = __name__
        setattr(module, name, replacement)
        logger.info("deepinfer: patched %s (%s)", patch.target, patch.why)
