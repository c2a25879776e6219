"""The supported range is checked before anything else, and outside it the start stops."""

import subprocess
import sys

import pytest

from deepinfer_plugin import install
from deepinfer_plugin.model_executor import vllm_compat


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.1rc1", "0.33.0", "0.33.9", "0.33.1.dev7+gabc"])
def test_supported_versions_pass(version):
    assert vllm_compat.is_supported(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0", "dev", ""])
def test_other_versions_do_not(version):
    assert not vllm_compat.is_supported(version)


def test_registration_outside_the_range_stops_the_start_and_names_both(monkeypatch):
    monkeypatch.delenv(vllm_compat.OVERRIDE, raising=False)
    monkeypatch.setattr("vllm.version.__version__", "0.35.1")
    with pytest.raises(RuntimeError, match=r"<0.34,>=0.32, found 0.35.1.*VLLM_PLUGINS.*DEEPINFER_ALLOW"):
        install.install()


def test_registration_outside_the_range_can_be_forced(monkeypatch):
    monkeypatch.setattr("vllm.version.__version__", "0.35.1")
    monkeypatch.setenv(vllm_compat.OVERRIDE, "1")
    install.install()


def test_the_refusal_comes_before_imports_that_may_have_moved():
    """In a process of its own: what this one has imported proves nothing."""
    script = """
import sys
import vllm.version
vllm.version.__version__ = "0.35.1"
from deepinfer_plugin import register
try:
    register()
except RuntimeError:
    moved = [name for name in sys.modules if name.startswith(("vllm.model_executor", "vllm.config", "vllm.v1"))]
    sys.exit(f"imported: {moved}" if moved else 0)
sys.exit("registered")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
