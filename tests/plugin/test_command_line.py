"""The console script."""

import json
import subprocess
import sys
from importlib.metadata import entry_points, version

import pytest

from deepinfer_plugin.__main__ import main


def test_the_console_script_is_this_module():
    (script,) = entry_points(group="console_scripts", name="deepinfer-plugin")
    assert script.load() is main


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"deepinfer-plugin {version('deepinfer-plugin')}\n"


def test_tiny_writes_a_checkpoint_by_seed_without_vllm(tmp_path):
    """In a process of its own, where importing vLLM raises."""
    code = """
import sys
sys.modules["vllm"] = None
from deepinfer_plugin.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        arguments = ["tiny", str(tmp_path / name), "--seed", str(seed)]
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert str(tmp_path / name) in done.stdout
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert "config.json" in files and "tokenizer.json" in files
    assert json.loads((tmp_path / "a" / "config.json").read_text())["architectures"] == ["DeepseekV41ForCausalLM"]

    def same(other: str) -> bool:
        return all((tmp_path / "a" / f).read_bytes() == (tmp_path / other / f).read_bytes() for f in files)

    assert same("b") and not same("c")


def test_tiny_tells_a_users_mistake_in_one_line(tmp_path, capsys):
    assert main(["tiny", str(tmp_path), "--seed", "-1"]) == 1
    (tmp_path / "file").write_text("")
    assert main(["tiny", str(tmp_path / "file")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("deepinfer-plugin tiny: ") for line in lines)


def test_without_a_command_the_usage_is_shown(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "tiny" in capsys.readouterr().err
