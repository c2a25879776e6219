"""Engram's integers: published primes and multipliers, and the classes of tokenizers made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models

from deepinfer_plugin.model_executor.models.engram_vocabulary import (
    class_table,
    engram_multipliers,
    engram_offsets,
    engram_primes,
    token_classes,
)
from deepinfer_plugin.model_executor.models.shape import ModelShape

RELEASED = ModelShape.from_json(json.loads(Path(__file__).with_name("released_config.json").read_text()))
# model specification, section 2.8 (b) and (c)
LAYER_1 = """16000057,16000079,16000081,16000097,16000121,16000129,16000133,16000183
16000189,16000207,16000211,16000253,16000277,16000289,16000307,16000321
16000339,16000381,16000393,16000399,16000403,16000409,16000447,16000463"""
LAYER_14 = """16000477,16000487,16000499,16000507,16000511,16000573,16000609,16000627
16000667,16000669,16000693,16000697,16000711,16000729,16000759,16000769
16000781,16000799,16000813,16000819,16000841,16000877,16000879,16000889"""


def table(text: str) -> list[list[int]]:
    return [[int(prime) for prime in line.split(",")] for line in text.splitlines()]


def tokenizer_file(folder: Path, tokens: list[str], added: list[str] = ()) -> Path:
    """A tokenizer whose token texts are exactly `tokens`, in byte-level letters, then `added`."""
    vocabulary = {token: n for n, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def byte_letters(text: str) -> str:
    """`text` as byte-level BPE writes it (ASCII letters, space and control characters, and C3/CC/CE-led pairs only)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(b if b in printable else 256 + others.index(b)) for b in text.encode())


def test_primes_equal_the_published_tables():
    first, second = engram_primes(RELEASED)
    assert first.tolist() == table(LAYER_1) and second.tolist() == table(LAYER_14)
    assert first.dtype == torch.int64


def test_small_primes_equal_those_counted_by_hand():
    shape = replace(
        RELEASED, engram_layer_ids=(1, 4), engram_n_heads=2, engram_vocab_size=256, engram_num_embeddings=(1618, 1824)
    )
    first, second = engram_primes(shape)
    assert first.tolist() == [[257, 263], [269, 271], [277, 281]]
    assert second.tolist() == [[283, 293], [307, 311], [313, 317]]


def test_a_prime_search_may_start_at_a_prime():
    shape = replace(
        RELEASED,
        engram_layer_ids=(1,),
        engram_n_heads=1,
        engram_max_ngram_size=3,
        engram_vocab_size=7,
        engram_num_embeddings=(18,),
    )
    assert engram_primes(shape)[0].tolist() == [[7], [11]]


def test_refuses_table_sizes_that_are_not_the_sums_of_the_primes():
    shape = replace(RELEASED, engram_num_embeddings=(384006168, 384016683))
    with pytest.raises(ValueError, match=r"sums of primes \[384006168, 384016682\], found \[384006168, 384016683\]"):
        engram_primes(shape)


def test_offsets_are_the_sums_of_the_tables_before():
    assert engram_offsets(torch.tensor([[257, 263], [269, 271]])).tolist() == [0, 257, 520, 789]


@pytest.mark.parametrize(
    "layer, multipliers",
    [
        (1, [76632096046245, 4839876093313, 35959672319349, 73987337458391]),
        (14, [67716810739261, 51510806800915, 30921347202721, 82619226485591]),
    ],
)
def test_multipliers_equal_the_published_ones(layer, multipliers):
    drawn = engram_multipliers(layer, 99092, 4)
    assert drawn.dtype == torch.int64 and drawn.tolist() == multipliers


def test_multipliers_times_any_class_stay_below_two_to_the_63():
    for num_classes in (1, 2, 330, 99092, 2**40):
        assert int(engram_multipliers(1, num_classes, 64).max()) * (num_classes - 1) < 2**63


@pytest.mark.parametrize(
    "texts",
    [
        ["the", "The", "THE", " the", " The ", "\tthe\n"],
        ["cafe", "café", "Café", "cafe\u0301", " CAFÉ"],
        [" ", "\n", "\t\t", " \r\n ", "  "],
        ["Σ", "σ", " Σ"],  # the library's lower-casing has no final-sigma rule
        ["ªx", "ax"],  # NFKC writes the ordinal indicator as its letter
        ["a  b", "A\n\tb", "a b"],
    ],
)
def test_texts_that_differ_by_case_accent_or_space_share_a_class(tmp_path, texts):
    tokens = list(dict.fromkeys(byte_letters(text) for text in ["unlike", *texts]))
    assert token_classes(tokenizer_file(tmp_path, tokens)) == [0] + [1] * (len(tokens) - 1)


@pytest.mark.parametrize(
    "texts",
    [
        ["the", "then", "t he"],
        [" ", "x", ""],
        ["σ", "ς"],
        ["\x1c", "\x1d", "\x1cx"],  # the library's strip keeps these controls
    ],
)
def test_other_texts_have_classes_of_their_own(tmp_path, texts):
    tokens = [byte_letters(text) for text in texts]
    assert token_classes(tokenizer_file(tmp_path, tokens)) == list(range(len(texts)))


def test_a_text_that_normalises_to_nothing_is_its_own_class(tmp_path):
    tokens = [byte_letters(text) for text in ("\u0301", "\u0300", "\u0301\u0300", "\x0b")]
    assert token_classes(tokenizer_file(tmp_path, tokens)) == [0, 1, 2, 3]


def test_pieces_of_a_character_are_known_by_their_vocabulary_string(tmp_path):
    halves = byte_letters("é")  # C3 and A9: the letters Ã and ©
    tokens = [*halves, byte_letters("a"), byte_letters("©"), halves]
    assert token_classes(tokenizer_file(tmp_path, tokens)) == [0, 1, 2, 1, 3]


def test_classes_are_numbered_in_first_seen_order_and_added_tokens_count(tmp_path):
    file = tokenizer_file(tmp_path, ["b", "a", "B", "A"], added=["<｜pad｜>", "b b", "<|PAD|>"])
    assert token_classes(file) == [0, 1, 0, 1, 2, 3, 2]


def test_the_table_gives_ids_that_the_file_lacks_the_pad_class(tmp_path):
    file = tokenizer_file(tmp_path, ["b", "a", "c", "B"])
    shape = replace(RELEASED, vocab_size=6, engram_pad_token_id=2, engram_compressed_vocab_size=3)
    classes = class_table(file, shape)
    assert classes.dtype == torch.int64 and classes.tolist() == [0, 1, 2, 0, 2, 2]
    assert class_table(file, replace(shape, vocab_size=2)).tolist() == [0, 1, 2, 0]


def test_refuses_another_number_of_classes_and_a_missing_pad_token(tmp_path):
    file = tokenizer_file(tmp_path, ["b", "a", "c", "B"])
    with pytest.raises(ValueError, match="engram_compressed_vocab_size is 99092, found 3 token classes"):
        class_table(file, RELEASED)
    with pytest.raises(ValueError, match="engram_pad_token_id is 4, found only 4 tokens"):
        class_table(file, replace(RELEASED, engram_compressed_vocab_size=3, engram_pad_token_id=4))
