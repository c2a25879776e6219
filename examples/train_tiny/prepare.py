"""Fetch the natural text, make up the conversations, train the tokenizer, and write the tokens to train on.

python examples/train_tiny/prepare.py [--folder DIR] [--train-tokenizer]

Writes DIR/train.npy and DIR/heldout.npy (uint16, documents one after the other in a fixed random order) and
DIR/heldout.jsonl. One document in a hundred is held out, chosen by the hash of its text, so that it stays held out when
a package changes.
"""

import argparse
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from generated import MAKERS, conversation
from sources import SOURCES, documents
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from deepinfer_plugin.model_executor.models.tiny_tokenizer import BOS, EOS, LAST_IDS, MARKERS, PAD

FOLDER = Path(__file__).parents[2] / "build" / "train_tiny"
TRAINED = Path(__file__).parents[2] / "model_executor" / "models" / "tiny_trained"
VOCAB_SIZE = 2048
NUM_CONVERSATIONS = 120_000
PIECE = 16_000  # characters of a long document that stay together when documents are shuffled
MAX_DOCUMENT = 300_000  # longer pages are lists of links or tables


@dataclass(frozen=True)
class Document:
    """source: its name in the data card. text: with V4.1's special tokens written out."""

    source: str
    text: str

    @property
    def is_held_out(self) -> bool:
        return int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:4]) % 100 == 0


def all_documents(downloads: Path) -> Iterator[Document]:
    for source in SOURCES:
        for text in tqdm(documents(source, downloads), desc=source.name, unit=" documents"):
            if 100 <= len(text) <= MAX_DOCUMENT:
                yield from (Document(source.name, piece) for piece in _pieces(text))
    for n in tqdm(range(NUM_CONVERSATIONS), desc="conversations", unit=" documents"):
        yield made_up_document(n)


def made_up_document(n: int) -> Document:
    """Conversation `n` in the chat format of vLLM's encoder; of every eighth, only what it says, as plain text."""
    from vllm.tokenizers.deepseek_v41_encoding import encode_messages

    if n % 8 == 0:
        rng = random.Random(n)
        makers = rng.choices(list(MAKERS), weights=MAKERS.values(), k=rng.randrange(2, 8))
        return Document("plain statements", f"{BOS}" + "\n".join(make(rng)[2] for make in makers) + EOS)
    messages, mode = conversation(n)
    effort = random.Random(n).choice(("low", "high", "max")) if mode == "thinking" else None
    return Document(
        "tool calls" if "tools" in messages[0] else "conversations",
        encode_messages(messages, thinking_mode=mode, drop_thinking=False, reasoning_effort=effort),
    )


def _pieces(text: str) -> Iterator[str]:
    """BOS before every piece, EOS after the last: the others go on in the document."""
    piece = BOS
    for paragraph in re.split(r"(?<=\n\n)", text):
        if len(piece) + len(paragraph) > PIECE and piece != BOS:
            yield piece
            piece = BOS
        piece += paragraph
    yield piece + EOS


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE whose digits stand alone. Ids: three special tokens, bytes, merges, then V4.1's later tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(LAST_IDS),
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    added = [BOS, EOS, PAD, *LAST_IDS]
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=t not in MARKERS) for t in added])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"tokenizer: must have {VOCAB_SIZE} tokens, has {tokenizer.get_vocab_size()}")
    return tokenizer


def without_specials(text: str) -> str:
    for token in (BOS, EOS, PAD, *LAST_IDS):
        text = text.replace(token, "\n")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for downloads and tokens")
    parser.add_argument("--train-tokenizer", action="store_true", help="anew, instead of the one in the package")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    everything = list(all_documents(args.folder / "downloads"))
    train = [d for d in everything if not d.is_held_out]
    if args.train_tokenizer:
        TRAINED.mkdir(parents=True, exist_ok=True)
        sample = random.Random(0).sample(train, len(train) // 3)
        train_tokenizer(without_specials(d.text) for d in sample).save(str(TRAINED / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    random.Random(0).shuffle(train)
    tokens, counts = [], Counter()
    for start in tqdm(range(0, len(train), 1000), desc="tokenise", unit=" thousand documents"):
        batch = train[start : start + 1000]
        encoded = tokenizer.encode_batch([d.text for d in batch], add_special_tokens=False)
        for document, encoding in zip(batch, encoded, strict=True):
            tokens.append(np.array(encoding.ids, dtype=np.uint16))
            counts[document.source] += len(encoding.ids)
    np.save(args.folder / "train.npy", np.concatenate(tokens))
    held_out = [d.text for d in everything if d.is_held_out]
    random.Random(0).shuffle(held_out)
    np.save(
        args.folder / "heldout.npy",
        np.array(tokenizer.encode("".join(held_out), add_special_tokens=False).ids, dtype=np.uint16),
    )
    with (args.folder / "heldout.jsonl").open("w", encoding="utf-8") as file:
        for document in everything:
            if document.is_held_out:
                file.write(json.dumps(vars(document), ensure_ascii=False) + "\n")
    (args.folder / "counts.json").write_text(json.dumps(counts, indent=2))
    print(f"{sum(counts.values()):,} tokens to train on: {dict(counts)}")


if __name__ == "__main__":
    main()
