"""The console script."""

import json
import subprocess
import sys
from importlib.metadata import entry_points, version

import pytest
from safetensors.torch import load_file

from deepinfer_plugin.__main__ import main
from deepinfer_plugin.model_executor.models.checkpoint import check_missing, check_tensor, expected_tensors
from deepinfer_plugin.model_executor.models.engram_vocabulary import class_table
from deepinfer_plugin.model_executor.models.shape import ModelShape


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


def test_tiny_trained_copies_a_whole_checkpoint_of_this_configuration(tmp_path, capsys):
    assert main(["tiny", "--trained", str(tmp_path / "trained")]) == 0
    assert "trained weights" in capsys.readouterr().out
    folder = tmp_path / "trained"
    shape = ModelShape.from_json(json.loads((folder / "config.json").read_text()))
    expected = {spec.name: spec for spec in expected_tensors(shape)}
    found = {}
    for shard in folder.glob("*.safetensors"):
        found |= load_file(shard)
    for name, tensor in found.items():
        check_tensor(expected, name, tensor)
    check_missing(expected, found)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 24e6
    class_table(folder / "tokenizer.json", shape)  # raises if the tokenizer is not the one that was trained with


def test_tiny_random_and_trained_exclude_each_other(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["tiny", "--trained", "--seed", "1", str(tmp_path)])
    assert "not allowed with" in capsys.readouterr().err


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
