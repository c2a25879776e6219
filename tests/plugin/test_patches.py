"""The patch mechanism: a name is replaced once, only if vLLM still has it as we know it, and it can be seen."""

import types

import pytest

from deepinfer_plugin import patches
from deepinfer_plugin.patches import Patch


@pytest.fixture
def module(monkeypatch):
    module = types.ModuleType("a_module_of_vllm")
    module.double = lambda x: 2 * x
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    return module


def patch_of(**changes):
    fields = {
        "target": "a_module_of_vllm:double",
        "wrap": lambda original: lambda x: original(x) + 1,
        "process": "worker",
        "expects": ("x",),
        "why": "test",
        "remove_when": "never",
    }
    return Patch(**{**fields, **changes})


def test_replaces_a_name_where_it_is_looked_up_and_only_once(module):
    patch = patch_of()
    assert not patches.is_applied(patch)
    patches.apply("worker", (patch,))
    patches.apply("worker", (patch,))
    assert module.double(3) == 7 and patches.is_applied(patch)


def test_replaces_a_method_of_a_class(module):
    module.Doubler = type("Doubler", (), {"double": lambda self, x: 2 * x})
    patch = patch_of(
        target="a_module_of_vllm:Doubler.double",
        wrap=lambda original: lambda self, x: original(self, x) + 1,
        expects=("self", "x"),
    )
    patches.apply("worker", (patch,))
    assert module.Doubler().double(3) == 7 and patches.is_applied(patch)


def test_leaves_other_processes_alone(module):
    patches.apply("engine", (patch_of(),))
    assert module.double(3) == 6


@pytest.mark.parametrize(
    "changes",
    [{"expects": ("x", "y")}, {"target": "a_module_of_vllm:triple"}, {"target": "a_module_of_vllm:Gone.double"}],
)
def test_refuses_when_vllm_has_moved(module, changes):
    with pytest.raises(RuntimeError, match="cannot patch a_module_of_vllm:"):
        patches.apply("worker", (patch_of(**changes),))
    assert module.double(3) == 6
