"""Engram's vocabulary, tables and hash, in Python's own integers. Source: model specification, section 2.8."""

from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

PROTECTED = "\ue000"
FOLD = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), PROTECTED),
        normalizers.Strip(),
        normalizers.Replace(PROTECTED, " "),
    ]
)


def classes_of(tokenizer_file: Path) -> list[int]:
    """The class of every token id of the file, added tokens included, numbered by first appearance."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    numbers: dict[str, int] = {}
    classes = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else FOLD.normalize_str(text) or text
        classes.append(numbers.setdefault(key, len(numbers)))
    return classes


def primes_of(config: dict) -> list[list[list[int]]]:
    """Table sizes by layer, order (2, 3, ...) and head: ascending primes, none used twice."""
    used: set[int] = set()

    def next_prime(start: int) -> int:
        number = start + 1
        while number in used or any(number % d == 0 for d in range(2, int(number**0.5) + 1)):
            number += 1
        used.add(number)
        return number

    tables = []
    for _ in config["engram_layer_ids"]:
        tables.append([])
        for _ in range(2, config["engram_max_ngram_size"] + 1):
            sizes, start = [], config["engram_vocab_size"] - 1
            for _ in range(config["engram_n_heads"]):
                sizes.append(start := next_prime(start))
            tables[-1].append(sizes)
    return tables


def multipliers_of(layer: int, num_classes: int, length: int) -> list[int]:
    bound = max(1, (2**63 - 1) // num_classes // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=length, dtype=np.int64)
    return [2 * int(number) + 1 for number in drawn]


def rows_of(tokens: list[int], is_image: list[bool], config: dict, classes: list[int], layer: int) -> list[list[int]]:
    """Table rows of every token: orders 2, 3, ... and their heads; an empty list for image tokens."""
    length = config["engram_max_ngram_size"]
    sizes = primes_of(config)[config["engram_layer_ids"].index(layer)]
    multipliers = multipliers_of(layer, len(set(classes)), length)
    pad = classes[config["engram_pad_token_id"]]
    rows: list[list[int]] = []
    for place in range(len(tokens)):
        if is_image[place]:
            rows.append([])
            continue
        gram, ended = [], False
        for k in range(length):
            ended = ended or place - k < 0 or is_image[place - k]
            token = tokens[place - k] if not ended else None
            gram.append(pad if token is None else classes[token] if token < len(classes) else pad)
        row, offset, roll = [], 0, gram[0] * multipliers[0]
        for order in range(1, length):
            roll ^= gram[order] * multipliers[order]
            for size in sizes[order - 1]:
                row.append(roll % size + offset)
                offset += size
        rows.append(row)
    return rows
