"""The tiny checkpoint: complete, small, reproducible, and readable by the libraries that will read it."""

import json
import random
import re
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deepinfer_plugin.kernels.quant_formats import decode_fp4, decode_fp8_blocks, decode_fp8_rows
from deepinfer_plugin.model_executor.models.checkpoint import check_missing, check_tensor, expected_tensors
from deepinfer_plugin.model_executor.models.engram_vocabulary import class_table, engram_primes, token_classes
from deepinfer_plugin.model_executor.models.shape import ModelShape
from deepinfer_plugin.model_executor.models.tiny import tiny_config, write_tiny

FILES = {
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
WEIGHTS = {name for name in FILES if name.endswith(".safetensors")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def shape(folder) -> ModelShape:
    return ModelShape.from_json(json.loads((folder / "config.json").read_text()))


@pytest.fixture(scope="module")
def tensors(folder) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(WEIGHTS):
        with safe_open(folder / file, "pt") as shard:
            found.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
    return found


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def hashes(folder: Path) -> dict[str, str]:
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_holds_exactly_the_tensors_that_the_configuration_asks_for(tensors, shape):
    expected = {spec.name: spec for spec in expected_tensors(shape)}
    for name, tensor in tensors.items():
        check_tensor(expected, name, tensor)
    check_missing(expected, tensors)


def test_the_index_names_each_tensors_file_and_the_total_size(folder, tensors):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    for file in WEIGHTS:
        with safe_open(folder / file, "pt") as shard:
            assert set(shard.keys()) == {name for name, place in index["weight_map"].items() if place == file}


def test_one_weight_lies_in_another_file_than_its_factors(folder):
    place = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    scales = [name for name in place if name.endswith(".scale")]
    assert sum(place[name] != place[name.removesuffix("scale") + "weight"] for name in scales) == 1


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(folder, tmp_path):
    write_tiny(tmp_path / "again")
    write_tiny(tmp_path / "deeper" / "other", seed=1)
    first, other = hashes(folder), hashes(tmp_path / "deeper" / "other")
    assert hashes(tmp_path / "again") == first and first.keys() == FILES
    assert {name for name in FILES if first[name] != other[name]} == WEIGHTS


def test_is_smaller_than_eight_megabytes(folder):
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8 * 2**20


def test_starts_hyper_connections_norms_and_sinks_as_specified(tensors):
    base = torch.full((24,), -3.0)
    base[3] = 3.0  # layer 7 reads stream 7 % 4
    base[4:8] = 0.0
    base[[8, 13, 18, 23]] = 3.0  # the diagonal of comb
    assert torch.equal(tensors["layers.7.hc_attn_base"], base)
    assert torch.equal(tensors["layers.7.hc_ffn_base"], base)
    assert tensors["mtp.1.hc_ffn_base"][:4].tolist() == [-3.0, 3.0, -3.0, -3.0]
    assert all((t == 0.01).all() for name, t in tensors.items() if re.search(r"hc_\w+_scale$", name))
    assert all((t == 1).all() for name, t in tensors.items() if re.search(r"norm\d?\.weight$", name))
    assert all((t == 0).all() for name, t in tensors.items() if name.endswith("attn_sink"))


def test_all_other_tensors_are_finite_and_not_constant(tensors):
    for name, tensor in tensors.items():
        if re.search(r"(hc_\w+_(scale|base)|norm\d?\.weight|attn_sink|\.scale)$", name):
            continue
        values = tensor.float()
        assert values.isfinite().all() and values.std() > 0, name


def test_text_and_image_biases_of_the_router_differ(tensors):
    for name, bias in tensors.items():
        if name.endswith("gate.bias"):
            assert (bias != tensors[f"{name}_vl"]).all(), name


def test_quantised_matrices_keep_products_near_one(tensors):
    # 1 / sqrt(in-features) each; 5 %: one standard error of the smallest one, [64, 64] numbers, is 1.1 %
    fp8 = decode_fp8_blocks(tensors["layers.3.attn.wq_b.weight"], tensors["layers.3.attn.wq_b.scale"])
    fp4 = decode_fp4(*(tensors[f"layers.3.ffn.experts.5.w2.{part}"] for part in ("weight", "scale")))
    rows = decode_fp8_rows(tensors["layers.4.engram.embed.weight"], tensors["layers.4.engram.embed.scale"])
    assert fp8.std() == pytest.approx(64**-0.5, rel=0.05)
    assert fp4.shape == (128, 64) and fp4.std() == pytest.approx(64**-0.5, rel=0.05)
    assert rows.shape == (1824, 32) and rows.std() == pytest.approx(1.0, rel=0.05)


def test_the_configuration_has_the_engram_sizes_of_its_own_tokenizer(folder, shape):
    assert [int(primes.sum()) for primes in engram_primes(shape)] == [1618, 1824]
    assert class_table(folder / "tokenizer.json", shape).shape == (512,)


def test_compression_joins_case_accents_and_spaces_and_nothing_else(folder, shape, tokenizer):
    classes = token_classes(folder / "tokenizer.json")
    assert len(classes) == 512 and max(classes) + 1 == shape.engram_compressed_vocab_size < 512

    def joined(*texts: str) -> bool:
        ids = [tokenizer.encode(text).ids for text in texts]
        assert all(len(i) == 1 for i in ids), ids
        return len({classes[i[0]] for i in ids}) == 1

    assert joined("the", "The", " the", " The")
    assert joined("cafe", "café", "Café")
    assert joined("é", "É", "è", "ê", "e", "E")
    assert joined(" ", "  ", "\n", "\n\n", "\t\t", " \n", "\r")
    assert not joined("the", "they") and not joined("<think>", "</think>") and not joined("c", "ç", "s")
    assert classes[:3] == [0, 1, 2]


def test_the_tokenizer_gives_back_any_text(tokenizer):
    rng = random.Random(0)
    planes = [(0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000)]
    for _ in range(200):
        text = "".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(rng.randrange(40)))
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    text = "<｜User｜>The café\n\n<think> it's  12｜DSML｜</think><｜end▁of▁sentence｜>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_special_token_is_one_id_in_its_place(folder, tokenizer):
    config = json.loads((folder / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["text_config"]["vocab_size"]
    places = {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1, "<｜▁pad▁｜>": 2}
    places |= {"<｜deepseek_image｜>": config["image_token_id"]}
    places |= {tokenizer.id_to_token(499): config["text_config"]["dspark_noise_token_id"]}
    for token, token_id in places.items():
        assert tokenizer.encode(token).ids == [token_id]
    for token_id in [*range(3), *range(486, 512)]:
        assert tokenizer.encode(tokenizer.id_to_token(token_id)).ids == [token_id]


def test_byte_tokens_are_the_256_bytes_in_order(tokenizer):
    for byte in range(128):
        assert tokenizer.encode(chr(byte)).ids == [3 + byte]
    assert tokenizer.encode("\U0010ffff").ids == [3 + byte for byte in "\U0010ffff".encode()]


@pytest.mark.parametrize("load", [AutoTokenizer.from_pretrained, PreTrainedTokenizerFast.from_pretrained])
def test_transformers_reads_the_tokenizer(folder, load):
    tokenizer = load(folder)
    assert len(tokenizer) == 512
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer.decode(tokenizer.encode("The café")) == "The café"


def test_vllms_chat_encoder_writes_one_id_for_each_special_token(folder):
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(str(folder), tokenizer_mode="deepseek_v41")
    messages = [{"role": "user", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(messages, thinking=False)
    hello = tokenizer.encode("Hello")
    user, assistant, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<｜User｜>", "<｜Assistant｜>", "</think>"))
    assert ids == [0, user, *hello, assistant, end]
    assert tokenizer.apply_chat_template(messages)[-1] == tokenizer.convert_tokens_to_ids("<think>")
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "none"}}]
    with_image = tokenizer.apply_chat_template([{"role": "user", "content": parts}], thinking=False)
    assert with_image.count(500) == 1 and max(with_image) < 512


def test_refuses_a_negative_seed(tmp_path):
    with pytest.raises(ValueError, match="seed must be 0 or more, got -1"):
        write_tiny(tmp_path, seed=-1)


def test_the_parity_size_has_the_released_heads_and_fits_packed_products() -> None:
    """Model specification, section 9; packed weights need rows and columns in multiples of 32."""
    shape = ModelShape.from_json(tiny_config("parity"))
    assert (shape.head_dim, shape.qk_rope_head_dim, shape.index_head_dim, shape.hc_mult) == (512, 64, 128, 4)
    assert shape.candidate_topk_blocks * shape.candidate_block_size >= shape.index_topk == 512
    for spec in expected_tensors(shape):
        if spec.dtype == torch.float8_e4m3fn and ".embed." not in spec.name:
            assert all(size % 32 == 0 for size in spec.shape), spec
