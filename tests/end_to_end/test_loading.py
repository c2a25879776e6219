"""A checkpoint that is not exactly V4.1's stops the start, and the message names the tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.end_to_end.conftest import start_engine, text_tokens


@pytest.fixture
def changed(tiny_checkpoint, tmp_path) -> Callable[[Callable[[dict[str, torch.Tensor]], None]], Path]:
    """Copies the checkpoint with its tensors changed by a function."""

    def copy(change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(tiny_checkpoint, folder)
        tensors: dict[str, torch.Tensor] = {}
        for shard in folder.glob("*.safetensors"):
            tensors |= load_file(shard)
            shard.unlink()
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").unlink()
        return folder

    return copy


def replace(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = make(tensors[name]).contiguous()

    return change


def remove(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


NORM = "layers.3.attn.q_norm.weight"
CASES = {
    "a missing norm": (remove(NORM), rf"{NORM}.*missing|missing.*{NORM}"),
    "a missing expert scale": (
        remove("layers.6.ffn.experts.5.w2.scale"),
        r"layers\.6\.ffn\.experts\.5\.w2\.scale",
    ),
    "a missing draft tensor": (remove("mtp.2.norm.weight"), r"mtp\.2\.norm\.weight"),
    "an extra tensor": (
        lambda tensors: tensors.update({"layers.0.attn.wq_c.weight": torch.zeros(2)}),
        r"layers\.0\.attn\.wq_c\.weight",
    ),
    "a misshaped norm": (replace(NORM, lambda t: t[:-1]), rf"{NORM}.*\[64\].*\[63\]|{NORM}.*\(64,\).*\(63,\)"),
    "a transposed projection": (
        replace("layers.1.attn.wq_a.weight", lambda t: t.view(torch.uint8).t().contiguous().view(t.dtype)),
        r"layers\.1\.attn\.wq_a\.weight",
    ),
    "a norm in fp16": (replace(NORM, lambda t: t.half()), rf"{NORM}.*(BF16|bfloat16).*(F16|float16)"),
    "an expert in int16": (
        replace("layers.0.ffn.experts.0.w1.weight", lambda t: t.to(torch.int16)),
        r"layers\.0\.ffn\.experts\.0\.w1\.weight",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_load_stops_and_names_the_tensor(changed, case):
    change, message = CASES[case]
    with pytest.raises(ValueError, match=message), start_engine(changed(change)):
        pass


def test_one_file_without_an_index_loads_as_well_as_shards(changed, tiny_checkpoint):
    with start_engine(tiny_checkpoint) as engine:
        want = engine.ask(text_tokens(20), max_tokens=3)[0]
    with start_engine(changed(lambda tensors: None)) as engine:
        got = engine.ask(text_tokens(20), max_tokens=3)[0]
    assert torch.equal(got.logits, want.logits)


def test_a_configuration_that_contradicts_itself_stops_the_start(tiny_checkpoint, tmp_path):
    folder = tmp_path / "changed"
    shutil.copytree(tiny_checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["engram_num_embeddings"][0] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="engram_num_embeddings"), start_engine(folder):
        pass
