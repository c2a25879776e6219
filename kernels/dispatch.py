"""One table per op says which module runs on which target. Nothing else in the project branches on hardware.

Code that was compiled for an architecture but never run on one is checked when first needed, against the op's
definition on small inputs; where it fails, the definition runs instead, and says so.
"""

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

import deepinfer_plugin.kernels
from deepinfer_plugin.kernels.target import Target, compute_capability, current_target

logger = logging.getLogger(f"vllm.{__name__}")
SEEN_RUNNING = (0, 90)  # compute capabilities on which the kernels have run; 0: not an NVIDIA GPU
DEFINITION = "reference"
_forced: dict[str, str] = {}
_tables: dict[str, "Dispatch"] = {}


def force(op: str, module: str) -> None:
    """Run `op` from `module` ("reference", say) whatever the target. For debugging and A/B runs."""
    _forced[op] = module
    if op in _tables:
        _tables[op]._chosen = None


def tables() -> dict[str, "Dispatch"]:
    """The tables of all ops, by op. Imports every op's folder, and no implementation."""
    for folder in iter_modules(deepinfer_plugin.kernels.__path__):
        if folder.ispkg:
            import_module(f"deepinfer_plugin.kernels.{folder.name}")
    return dict(sorted(_tables.items()))


def check_forced(forced: Mapping[str, str]) -> None:
    """Raises ValueError: `forced` names an op or a module that does not exist."""
    known = tables() if forced else {}
    for op, module in forced.items():
        if op not in known:
            raise ValueError(f"force_kernels: unknown op {op!r}; known: {', '.join(known)}")
        if not find_spec(f"{known[op].package}.{module}"):
            have = ", ".join(m.name for m in iter_modules(import_module(known[op].package).__path__))
            raise ValueError(f"force_kernels: {op} has no module {module!r}, only {have}")


class Dispatch:
    """The table of one op, callable. A module is imported when first needed: no target wants another's toolchain.

    Args:
        package: the op's folder (`__name__` of its `__init__.py`).
        op: the function's name in every implementation module; the folder's name unless the folder holds several ops.
        cpu, **others: target -> module in the folder.
    """

    def __init__(self, package: str, op: str | None = None, *, cpu: str, **others: str) -> None:
        self.package, self.op = package, op or package.rpartition(".")[2]
        self.table = {Target(name): module for name, module in {"cpu": cpu, **others}.items()}
        self._loaded: dict[str, Callable[..., Any]] = {}
        self._chosen: Callable[..., Any] | None = None  # what calls run, until `force` changes it
        _tables[self.op] = self

    def load(self, module: str) -> Callable[..., Any]:
        if module not in self._loaded:
            self._loaded[module] = getattr(import_module(f"{self.package}.{module}"), self.op)
        return self._loaded[module]

    def choose(self, target: Target) -> str:
        for row in target.lineage:
            if row in self.table:
                return self.table[row]
        have = ", ".join(row.value for row in self.table)
        raise NotImplementedError(f"{self.op}: no kernel for {target.value}, only for {have}")

    def chosen(self) -> tuple[str, str]:
        """The module that runs here, and why."""
        if self.op in _forced:
            return _forced[self.op], "forced by option force_kernels"
        target = current_target()
        return self.choose(target), f"table row for {target.value}"

    def __call__(self, *args: Any) -> Any:
        if self._chosen is None:
            module = self.chosen()[0]
            if self.op not in _forced and module != DEFINITION and compute_capability() not in SEEN_RUNNING:
                module = self._checked(module)
            self._chosen = self.load(module)
        return self._chosen(*args)

    def _checked(self, module: str) -> str:
        """`module` if it computes what the definition does on this device, else the definition's."""
        from deepinfer_plugin.kernels.samples import wrong_result  # which imports every table

        problem = wrong_result(self.op, module)
        if problem is None:
            return module
        logger.warning(
            "%s: %s is SWITCHED OFF on compute capability %d, where it was never run before: %s. The slow %s runs.",
            *(self.op, module, compute_capability(), problem, DEFINITION),
        )
        return DEFINITION
