"""The house keeps its floors: a folder imports from its own floor and from those below."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ["kernels", "model_executor", "spec_decode", "deepinfer_plugin"]  # from the ground up
FILES = [
    f
    for floor in FLOORS
    for f in sorted((ROOT / floor).rglob("*.py"))
    if (ROOT / floor).resolve() in f.resolve().parents
]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports absolutely, from deepinfer_plugin on"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor_of(name: str) -> int | None:
    parts = name.split(".")
    if parts[0] != "deepinfer_plugin":
        return None
    return FLOORS.index(parts[1]) if parts[1:2] and parts[1] in FLOORS else len(FLOORS) - 1


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downwards(path: Path) -> None:
    own = FLOORS.index(path.relative_to(ROOT).parts[0])
    above = [name for name in imported(path) if (floor_of(name) or 0) > own]
    assert not above, f"{FLOORS[own]}/ is below what it imports: {above}"


@pytest.mark.parametrize("path", [f for f in FILES if f.is_relative_to(ROOT / "kernels")], ids=lambda p: p.name)
def test_kernels_do_not_know_vllm(path: Path) -> None:
    assert not [name for name in imported(path) if name.split(".")[0] == "vllm"]


@pytest.mark.parametrize("folder", FLOORS[:3])
def test_linked_folders_are_namespaces(folder: str) -> None:
    """./kernels/__init__.py would hide the `kernels` package of PyPI from whatever is started in this folder."""
    assert not (ROOT / folder / "__init__.py").exists()
    assert (ROOT / "deepinfer_plugin" / folder).resolve() == ROOT / folder
