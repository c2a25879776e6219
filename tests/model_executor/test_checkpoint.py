"""The checkpoint's table of tensors: counted against the published index, and hand-picked rows of it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer_plugin.model_executor.models.checkpoint import (
    bare_name,
    check_missing,
    check_tensor,
    expected_tensors,
)
from deepinfer_plugin.model_executor.models.shape import ModelShape

RELEASED = ModelShape.from_json(json.loads(Path(__file__).with_name("released_config.json").read_text()))
EXPECTED = {spec.name: spec for spec in expected_tensors(RELEASED)}


def test_equals_the_published_index_in_tensors_and_bytes():
    assert sum(1 for _ in expected_tensors(RELEASED)) == len(EXPECTED) == 96_085
    assert sum(spec.nbytes for spec in EXPECTED.values()) == 510_286_023_000


def test_holds_the_published_number_of_fp32_elements():
    fp32 = [spec for spec in EXPECTED.values() if spec.dtype == torch.float32]
    assert sum(math.prod(spec.shape) for spec in fp32) == 42_307_282


@pytest.mark.parametrize(
    "prefix, count",
    [("layers.0.", 2334), ("layers.8.", 2334 + 3 + 5), ("layers.20.", 2334 + 2 + 5), ("layers.24.", 2334 + 3)]
    + [("layers.1.", 2334 + 6), ("layers.14.", 2334 + 3 + 5 + 6)]
    + [("mtp.0.", 798 + 3), ("mtp.1.", 798), ("mtp.2.", 798 + 4), ("vision.", 259), ("aligner.", 4), ("image_", 3)],
)
def test_counts_each_part_as_computed_by_hand(prefix, count):
    assert sum(name.startswith(prefix) for name in EXPECTED) == count


E4M3, E8M0, BF16, F32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        ("layers.39.hc_ffn_fn", (24, 20480), F32),
        ("layers.0.attn.wq_a.scale", (40, 160), E8M0),
        ("layers.0.attn.wo_a.weight", (8192, 4096), E4M3),
        ("layers.0.attn.wo_a.scale", (256, 128), E8M0),
        ("layers.5.ffn.experts.383.w2.weight", (5120, 1152), torch.int8),
        ("layers.5.ffn.experts.383.w2.scale", (5120, 72), E8M0),
        ("layers.5.ffn.shared_experts.w1.scale", (72, 160), E8M0),
        ("layers.14.attn.compressor.wgate.weight", (512, 5120), BF16),
        ("layers.36.attn.indexer.wq_b.scale", (128, 40), E8M0),
        ("layers.20.attn.indexer.wk.weight", (128, 512), BF16),
        ("layers.14.engram.embed.weight", (384016682, 256), E4M3),
        ("layers.14.engram.embed.scale", (384016682, 8), E8M0),
        ("layers.1.engram.wkv.scale", (800, 192), E8M0),
        ("mtp.0.main_proj.scale", (160, 480), E8M0),
        ("mtp.1.ffn.gate.bias_vl", (128,), F32),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), BF16),
        ("vision.patch_embed.proj.weight", (1024, 588), BF16),
        ("vision.blocks.31.mlp.w1.weight", (5632, 1024), BF16),
        ("aligner.w1.weight", (5120, 9216), BF16),
    ],
)
def test_gives_the_shape_and_dtype_of_the_specification(name, shape, dtype):
    assert (EXPECTED[name].shape, EXPECTED[name].dtype) == (shape, dtype)


@pytest.mark.parametrize(
    "name",
    ["layers.20.attn.compressor.wgate.weight", "layers.24.attn.indexer.wk.weight", "mtp.0.embed.weight"]
    + ["layers.0.hc_attn_norm.weight", "hc_head_fn", "mtp.0.norm.weight"],
)
def test_refuses_a_tensor_that_the_network_has_no_place_for(name):
    with pytest.raises(ValueError, match=rf"no tensor {name}, found one of \(2,\) torch.bfloat16"):
        check_tensor(EXPECTED, name, torch.zeros(2, dtype=BF16))


def test_leaves_the_vision_part_out_when_the_encoder_has_no_layers():
    text_only = replace(RELEASED, vision=replace(RELEASED.vision, num_hidden_layers=0))
    names = [spec.name for spec in expected_tensors(text_only)]
    assert len(EXPECTED) - len(names) == 259 + 4
    assert not any(name.startswith(("vision.", "aligner.")) for name in names)


def test_refuses_another_shape_and_another_dtype_with_both_sides_in_the_message():
    check_tensor(EXPECTED, "norm.weight", torch.empty(5120, dtype=BF16))
    with pytest.raises(ValueError, match=r"norm.weight must be \(5120,\) torch.bfloat16, found \(5121,\)"):
        check_tensor(EXPECTED, "norm.weight", torch.empty(5121, dtype=BF16))
    with pytest.raises(ValueError, match=r"norm.weight must be .* found \(5120,\) torch.float32"):
        check_tensor(EXPECTED, "norm.weight", torch.empty(5120))


def test_accepts_one_leading_model_and_no_more():
    assert bare_name("model.norm.weight") == bare_name("norm.weight") == "norm.weight"
    check_tensor(EXPECTED, "model.norm.weight", torch.empty(5120, dtype=BF16))
    with pytest.raises(ValueError, match="no tensor model.model.norm.weight"):
        check_tensor(EXPECTED, "model.model.norm.weight", torch.empty(5120, dtype=BF16))


def test_names_the_first_missing_tensors_and_counts_all():
    names = [f"t{n}" for n in range(9)]
    check_missing(names, [f"model.{name}" for name in names])
    with pytest.raises(ValueError, match=r"all 9 tensors must be there, 7 missing: t2, t3, t4, t5, t6, …$"):
        check_missing(names, {"t0", "t1"})
    with pytest.raises(ValueError, match=r"1 missing: t8$"):
        check_missing(names, names[:8])
