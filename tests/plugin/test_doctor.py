"""The doctor asks vLLM itself, and its exit status says whether V4.1 would be served by us."""

import json

import pytest

from deepinfer_plugin import doctor, install
from deepinfer_plugin.__main__ import main
from deepinfer_plugin.kernels.dispatch import force, tables
from deepinfer_plugin.model_executor import vllm_compat
from deepinfer_plugin.patches import PATCHES


@pytest.fixture
def ask(tiny_checkpoint, capsys):
    def run() -> tuple[int, dict]:
        status = main(["doctor", "--json", "--model", str(tiny_checkpoint)])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_a_healthy_installation(ask):
    status, found = ask()
    assert status == 0 and found["problems"] == []
    assert found["architectures"][install.ARCH] == install.MODEL_CLASS
    assert found["entry_point"] == "deepinfer_plugin:register"
    assert vllm_compat.is_supported(found["vllm_found"])
    assert found["kernels"].keys() == tables().keys()
    assert found["cache"]["block_size"] == found["cache"]["prefix_hit_granularity"] == 64
    assert len(found["cache"]["groups"]) >= 4 and found["cache"]["prefix_caching"]
    assert any("MODELS_CONFIG_MAP" in hook for hook in found["hooks"])
    assert [(patch["target"], patch["applied"]) for patch in found["patches"]] == [
        ("vllm.sampling_params:SamplingParams._validate_spec_decode", True),
        *((patch.target, None) for patch in PATCHES if patch.process == "worker"),
    ]


def test_the_text_says_the_same(tiny_checkpoint, capsys):
    assert main(["doctor", "--model", str(tiny_checkpoint)]) == 0
    text = capsys.readouterr().out
    assert f"would be served by {install.MODEL_CLASS}" in text
    assert "prefix_hit_granularity" in text and "sparse_attention" in text


def test_a_forced_kernel_is_shown_with_its_reason(monkeypatch):
    monkeypatch.setattr("deepinfer_plugin.kernels.dispatch._forced", {})
    force("swiglu", "reference")
    assert tables()["swiglu"].chosen() == ("reference", "forced by option force_kernels")


def test_an_unsupported_vllm_is_a_problem(ask, monkeypatch):
    monkeypatch.setattr("vllm.version.__version__", "0.35.1")
    status, found = ask()
    assert status == 1 and found["vllm_found"] == "0.35.1"
    assert "must be <0.34,>=0.32, found 0.35.1" in found["problems"][0]


def test_a_vllm_that_is_not_there_is_a_problem(ask, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm.version", None)
    status, found = ask()
    assert status == 1 and found["problems"] == ["vLLM is not installed in this environment"]


def test_being_left_out_by_the_environment_is_a_problem(ask, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    status, found = ask()
    assert status == 1 and "VLLM_PLUGINS leaves 'deepinfer' out" in found["problems"][0]


def test_a_missing_entry_point_is_a_problem(ask, monkeypatch):
    monkeypatch.setattr(doctor, "entry_points", lambda **_: ())
    status, found = ask()
    assert status == 1 and "entry point 'deepinfer'" in found["problems"][0]


def test_another_owner_is_a_problem(ask):
    from vllm.model_executor.models import ModelRegistry

    ModelRegistry.register_model(install.ARCH, "other_plugin.model:ThiefForCausalLM")
    status, found = ask()
    assert status == 1
    assert "would be served by other_plugin.model.ThiefForCausalLM" in found["problems"][0]


def test_a_plugin_that_raises_is_a_problem(ask, monkeypatch):
    monkeypatch.setattr("vllm.plugins.plugins_loaded", False)
    monkeypatch.setattr("vllm.plugins.load_plugins_by_group", lambda group: {"bad": lambda: 1 / 0})
    status, found = ask()
    assert status == 1 and "a plugin stops vLLM's start: division by zero" in found["problems"][0]


def test_a_folder_that_is_no_model_is_a_problem(tmp_path, capsys):
    assert main(["doctor", "--json", "--model", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0].startswith("configuration: ")
