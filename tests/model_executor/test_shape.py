"""ModelShape: topology of the released and the tiny configuration, and each rule it refuses."""

import copy
import json
from collections import Counter
from pathlib import Path

import pytest

from deepinfer_plugin.model_executor.models.shape import ModelShape
from deepinfer_plugin.model_executor.models.tiny import CONFIG

RELEASED = json.loads(Path(__file__).with_name("released_config.json").read_text())
TINY = json.loads(CONFIG.read_text())
REMOVED = object()


def shape_of(config: dict, **changes) -> ModelShape:
    """The shape of `config` with some fields of its `text_config` changed; `part__field` names those of a part."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        part, _, field = name.rpartition("__")
        place = config[part] if part in config else config["text_config"][part] if part else config["text_config"]
        if value is REMOVED:
            del place[field]
        else:
            place[field] = value
    return ModelShape.from_json(config)


def test_the_released_layers_are_2_window_4_full_4_reindex_and_30_reuse():
    shape = shape_of(RELEASED)
    kinds = Counter(shape.kind(layer) for layer in range(shape.num_hidden_layers))
    assert kinds == {"window": 2, "full": 4, "reindex": 4, "reuse": 30}
    assert shape.decoder_start == 20


def test_released_layers_share_the_memory_of_the_nearest_source_before_them():
    shape = shape_of(RELEASED)
    kv = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    index = kv[:24] + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [shape.kv_source(layer) for layer in range(40)] == kv
    assert [shape.index_source(layer) for layer in range(40)] == index
    assert [layer for layer in range(40) if shape.searches_candidates(layer)] == [24, 28, 32, 36]


@pytest.mark.parametrize(
    "layer, kind, ratio, kv_source, index_source, searches_candidates",
    [
        (0, "window", 0, None, None, False),
        (1, "window", 0, None, None, False),
        (2, "full", 2, 2, 2, False),
        (3, "reuse", 2, 2, 2, False),
        (4, "full", 2, 4, 4, False),
        (5, "full", 1, 5, 5, False),
        (6, "reindex", 1, 5, 6, True),
        (7, "reuse", 1, 5, 6, False),
        (8, "window", 0, None, None, False),  # the first draft block
    ],
)
def test_the_tiny_layers_cover_every_kind(layer, kind, ratio, kv_source, index_source, searches_candidates):
    shape = shape_of(TINY)
    assert shape.kind(layer) == kind
    assert (shape.ratio(layer), shape.kv_source(layer), shape.index_source(layer)) == (ratio, kv_source, index_source)
    assert shape.searches_candidates(layer) == searches_candidates


def test_reads_numbers_from_every_part_of_the_file():
    shape = shape_of(RELEASED)
    assert (shape.hidden_size, shape.rms_norm_eps, shape.image_token_id) == (5120, 1e-20, 129264)
    assert shape.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert (shape.yarn.factor, shape.yarn.original_max_position_embeddings) == (16, 65536)
    assert (shape.vision.num_hidden_layers, shape.vision.downsample_ratio) == (32, 3)


@pytest.mark.parametrize("config", [RELEASED, TINY], ids=["released", "tiny"])
def test_vllms_flattened_configuration_gives_the_same_shape(config):
    from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config

    assert ModelShape.from_hf_config(DeepseekV41Config(**copy.deepcopy(config))) == ModelShape.from_json(config)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_act": "gelu"}, "text_config.hidden_act must be 'silu' for V4.1, found 'gelu'"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc'"),
        ({"scoring_func": "sigmoid"}, "scoring_func must be 'sqrtsoftplus'"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be True"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 1"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False"),
        ({"quantization_config__weight_block_size": [128, 128]}, r"weight_block_size must be \[32, 32\]"),
        ({"quantization_config__scale_fmt": "float"}, "quantization_config.scale_fmt must be 'ue8m0'"),
        ({"quantization_config__expert_dtype": "fp8"}, "expert_dtype must be 'fp4'"),
        ({"quantization_config__activation_scheme": "static"}, "activation_scheme must be 'dynamic'"),
        ({"hc_mult": REMOVED, "index_topk": REMOVED}, "V4.1 needs index_topk, hc_mult in text_config, found none"),
        ({"rope_scaling__beta_fast": REMOVED}, "rope_scaling needs beta_fast, found only"),
        ({"vision_config__patch_size": REMOVED}, "vision_config needs patch_size, found only"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1]}, "compress_ratios must have 11 entries of 0, 1 or 2"),
        ({"compress_ratios": [0, 0, 4, 4, 4, 1, 1, 1, 0, 0, 0]}, "compress_ratios must have 11 entries of 0, 1 or 2"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 2, 2, 2, 0, 0, 0]}, "must have a first 1"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 1, 0]}, "draft blocks must have 0"),
        ({"kv_source_layer_ids": [2, 3, 4, 5]}, "kv_source_layer_ids must be index sources too"),
        ({"kv_source_layer_ids": [4, 5]}, "must have a KV and an index source before it"),
        ({"kv_source_layer_ids": []}, "must have a KV and an index source before it"),
        ({"candidate_source_layer_id": 7}, "candidate_source_layer_id must be an index source"),
        ({"candidate_block_size": 4}, "candidate_block_size must be 8 or 16"),
        ({"candidate_topk_blocks": 12}, "candidate_topk_blocks must be a multiple of 8, at most 4096"),
        ({"candidate_topk_blocks": 4104}, "candidate_topk_blocks must be a multiple of 8, at most 4096"),
        ({"index_topk": 65}, "candidate blocks must hold at least index_topk entries"),
        ({"n_shared_experts": 0}, "n_shared_experts must be at least 1"),
        ({"o_groups": 3}, "num_attention_heads must be a multiple of o_groups"),
        ({"engram_layer_ids": [1, 5]}, "engram_layer_ids must lie before the decoder start"),
        (
            {"compress_ratios": [0, 0, 2, 1, 1, 1, 1, 1, 0, 0, 0], "engram_layer_ids": [1, 2]},
            r"KV source's ratio, layers \[3\] have not",
        ),
        ({"kv_source_layer_ids": [2, 4], "candidate_source_layer_id": 4}, r"layers \[5, 6, 7\] have not"),
    ],
)
def test_refuses_what_v41_is_not_defined_for(changes, message):
    with pytest.raises(ValueError, match=f"^config.json: .*{message}"):
        shape_of(TINY, **changes)


def test_names_every_broken_rule_at_once():
    with pytest.raises(ValueError, match="candidate_block_size must be 8 or 16; n_shared_experts must be at least 1"):
        shape_of(TINY, candidate_block_size=32, n_shared_experts=0)
