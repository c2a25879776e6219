"""The integers behind Engram, all computed from the checkpoint: token classes, table sizes, and hash multipliers.

One class more or less changes every multiplier and with it every row that is read, so counts are compared, not trusted.
"""

from math import isqrt
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer_plugin.model_executor.models.shape import ModelShape

LONE_SPACE = "\ue000"  # stands for a text that is one space while both ends are stripped

NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex("[ \t\r\n]+"), " "),
        normalizers.Replace(Regex("^ $"), LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(LONE_SPACE, " "),
    ]
)


def token_classes(tokenizer_file: Path) -> list[int]:
    """Class of every token of a `tokenizer.json`, added tokens included, numbered in first-seen order of ids.

    Two tokens share a class if their texts differ only by case, accents, compatibility forms or surrounding space.
    A token that is not valid UTF-8 on its own is known by its vocabulary string.

    Source: model specification, section 2.8 (a).
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    classes: dict[str | None, int] = {}
    return [
        classes.setdefault(_class_key(tokenizer, token_id), len(classes))
        for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True))
    ]


def class_table(tokenizer_file: Path, shape: ModelShape) -> torch.Tensor:
    """Class of every token id, int64 [max(vocab_size, tokens of the file)].

    Ids that the model has but the file has not get the pad token's class.

    Raises:
        ValueError: the file has another number of classes than the checkpoint says, or lacks the pad token.
    """
    classes = token_classes(tokenizer_file)
    found, expected = max(classes, default=-1) + 1, shape.engram_compressed_vocab_size
    if found != expected:
        raise ValueError(f"{tokenizer_file}: engram_compressed_vocab_size is {expected}, found {found} token classes")
    if shape.engram_pad_token_id >= len(classes):
        pad = shape.engram_pad_token_id
        raise ValueError(f"{tokenizer_file}: engram_pad_token_id is {pad}, found only {len(classes)} tokens")
    missing = max(0, shape.vocab_size - len(classes))
    return torch.tensor(classes + [classes[shape.engram_pad_token_id]] * missing, dtype=torch.int64)


def engram_primes(shape: ModelShape) -> list[torch.Tensor]:
    """Rows of each hash table: per Engram layer int64 [orders, engram_n_heads], orders 2..engram_max_ngram_size.

    Every order starts again at `engram_vocab_size` and takes the next primes that no earlier order of any layer has.

    Raises:
        ValueError: a layer's sum is not its `engram_num_embeddings`.

    Source: model specification, section 2.8 (b).
    """
    used: set[int] = set()
    orders = range(2, shape.engram_max_ngram_size + 1)
    tables = [[_unused_primes(shape, used) for _ in orders] for _ in shape.engram_layer_ids]
    found, expected = [sum(map(sum, table)) for table in tables], list(shape.engram_num_embeddings)
    if found != expected:
        raise ValueError(f"config.json: engram_num_embeddings must be the sums of primes {found}, found {expected}")
    return [torch.tensor(table, dtype=torch.int64) for table in tables]


def engram_offsets(primes: torch.Tensor) -> torch.Tensor:
    """First row of each hash table in a layer's common table: int64 [orders * engram_n_heads], order-major."""
    sizes = primes.flatten()
    return sizes.cumsum(0) - sizes


def engram_multipliers(layer_id: int, num_classes: int, max_ngram_size: int) -> torch.Tensor:
    """Odd multipliers of one layer's hash, int64 [max_ngram_size]; times any class they stay below 2**63.

    Source: model specification, section 2.8 (c).
    """
    bound = max(1, (2**63 - 1) // num_classes // 2)
    drawn = np.random.default_rng(10007 * layer_id).integers(0, bound, size=max_ngram_size, dtype=np.int64)
    return torch.tensor((drawn * 2 + 1).tolist(), dtype=torch.int64)


def _class_key(tokenizer: Tokenizer, token_id: int) -> str | None:
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if "\ufffd" in text:
        return tokenizer.id_to_token(token_id)
    return NORMALIZER.normalize_str(text) or text


def _unused_primes(shape: ModelShape, used: set[int]) -> list[int]:
    primes: list[int] = []
    number = shape.engram_vocab_size
    while len(primes) < shape.engram_n_heads:
        if number not in used and all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            primes.append(number)
            used.add(number)
        number += 1
    return primes
