"""The plugin is never silently absent: it serves V4.1, or the start stops and says why."""

import ast
import importlib
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import deepinfer_plugin
from deepinfer_plugin import install
from deepinfer_plugin.config_hook import owner


def start(folder: Path, **options):
    """The configuration that `vllm serve FOLDER` would make."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(str(folder), **options).create_engine_config()


def test_vllm_resolves_the_architecture_to_our_class():
    from vllm.model_executor.models import ModelRegistry

    loaded = ModelRegistry.models[install.ARCH].load_model_cls()
    assert f"{loaded.__module__}.{loaded.__qualname__}" == install.MODEL_CLASS
    assert owner(install.ARCH) == install.MODEL_CLASS


def test_registering_again_changes_nothing():
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    before = MODELS_CONFIG_MAP[install.ARCH]
    deepinfer_plugin.register()
    deepinfer_plugin.register()
    assert MODELS_CONFIG_MAP[install.ARCH] is before


def test_one_line_per_process_says_what_is_served_and_by_which_class(monkeypatch):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda line: lines.append(line.getMessage())
    logger = logging.getLogger("vllm.deepinfer_plugin.install")
    logger.addHandler(handler)
    monkeypatch.setattr(install, "_announced", False)
    try:
        deepinfer_plugin.register()
        deepinfer_plugin.register()
    finally:
        logger.removeHandler(handler)
    assert len(lines) == 1
    assert install.ARCH in lines[0] and install.MODEL_CLASS in lines[0]


def test_the_package_itself_imports_nothing():
    """vLLM only logs when an entry point cannot be imported, and goes on with its own V4.1."""
    tree = ast.parse(Path(deepinfer_plugin.__file__).read_text())
    assert not [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]


def test_an_import_error_in_our_code_stops_the_start():
    """Each module that registration needs, in a process where importing it raises."""
    script = """
import os, sys
import vllm.config, vllm.model_executor.models
from vllm.plugins import load_general_plugins
for broken in sys.argv[1:]:
    if os.fork() == 0:
        sys.modules[broken] = None
        try:
            load_general_plugins()
        except ImportError as error:
            os._exit(0 if broken in str(error) else 2)
        os._exit(1)
    if os.wait()[1]:
        sys.exit(f"{broken}: its import error did not stop the start")
"""
    broken = ["install", "config_hook", "kernels.dispatch"]
    broken += [f"model_executor.{name}" for name in ("vllm_compat", "quantization", "config")]
    arguments = [f"deepinfer_plugin.{name}" for name in broken]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def own_checkpoint(tiny_checkpoint, tmp_path):
    """A copy: vLLM remembers by folder which class it has resolved."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")


def test_an_import_error_in_the_model_stops_the_start(own_checkpoint, tmp_path, monkeypatch):
    from vllm.model_executor.models import ModelRegistry

    (tmp_path / "broken_model.py").write_text("import a_module_that_does_not_exist\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    ModelRegistry.register_model(install.ARCH, f"broken_model:{install.ARCH}")
    with pytest.raises(Exception, match="failed to be inspected"):
        start(own_checkpoint)


def test_a_plugin_that_takes_the_architecture_later_stops_the_start_by_name(own_checkpoint):
    from vllm.model_executor.models import ModelRegistry

    ours = importlib.import_module(install.MODULE).DeepseekV41ForCausalLM
    thief = type("ThiefForCausalLM", (ours,), {"__module__": "other_plugin.model"})
    ModelRegistry.register_model(install.ARCH, thief)
    with pytest.raises(RuntimeError, match=r"other_plugin\.model\.ThiefForCausalLM was registered for it later"):
        start(own_checkpoint)


def test_the_native_class_taking_it_back_stops_the_start(own_checkpoint):
    from vllm.model_executor.models import ModelRegistry

    ModelRegistry.register_model(install.ARCH, f"vllm.models.deepseek_v41:{install.ARCH}")
    assert owner(install.ARCH).startswith("vllm.")
    with pytest.raises(Exception, match=r"registered for it later|failed to be inspected"):
        start(own_checkpoint)


def test_the_owner_of_an_unknown_architecture_is_nobody():
    assert owner("NobodysForCausalLM") == "nobody"


def test_importing_the_package_does_not_import_torch_or_vllm():
    code = "import sys, deepinfer_plugin; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
