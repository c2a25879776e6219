"""One table per op says which module runs on which target. Nothing else in the project branches on hardware."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from deepinfer_plugin.kernels.target import Target, current_target

_forced: dict[str, str] = {}
_tables: dict[str, "Dispatch"] = {}


def force(op: str, module: str) -> None:
    """Run `op` from `module` ("reference", say) whatever the target. For debugging and A/B runs."""
    _forced[op] = module


def tables() -> Iterator["Dispatch"]:
    """Every table of this process, in order of import."""
    yield from _tables.values()


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
        return self.load(_forced.get(self.op) or self.choose(current_target()))(*args)
