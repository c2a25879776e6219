"""The tokenizer of the tiny checkpoint: byte-level BPE whose words differ only by case, accents or a leading space.

Every listed word is one token. Ids: three special tokens, 256 bytes, merged pieces, then the chat and image tokens.
"""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

VOCAB_SIZE = 512
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE = "<｜deepseek_image｜>"
# kept in decoded text, because parsers look for them there
MARKERS = ["<think>", "</think>", "｜DSML｜"]
ROLES = ["<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"]
TASKS = ["<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>"]
RESERVED = [f"<｜place▁holder▁no▁{n}｜>" for n in range(12)]  # the first is the draft's noise token
LAST_IDS = [*ROLES, *MARKERS, *TASKS, RESERVED[0], IMAGE, *RESERVED[1:]]  # up to id 511

STEMS = "the of and to in is it you that he was for on are as with his they be at one have this from or had by"
ACCENTED = ["é", "è", "ê", "É", "ñ", "ü", "ç", "à", "café", "Café", "cafe"]
SPACES = ["  ", "\n\n", " \n", "\t\t"]
LATER_STEMS = (  # as many as there are ids left
    "what all were when we there can an your which their said if do will each how out up then her"
)


def tiny_tokenizer() -> Tokenizer:
    """The same tokenizer at every call; `decode(encode(text)) == text` for every text."""
    alphabet = _byte_letters()
    first_ids = [BOS, EOS, PAD, *alphabet]
    merges = _merges(_words(), alphabet, VOCAB_SIZE - len(first_ids) - len(LAST_IDS))
    tokens = [*first_ids, *("".join(pair) for pair in merges), *LAST_IDS]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    added = [BOS, EOS, PAD, *LAST_IDS]
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=t not in MARKERS) for t in added])
    return tokenizer


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte, in byte order: itself if printable, else one after 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _words() -> Iterable[str]:
    for stem in STEMS.split():
        yield from (stem, f" {stem}", stem.capitalize(), f" {stem.capitalize()}")
    yield from SPACES
    yield from ACCENTED
    for stem in LATER_STEMS.split():
        yield from (f" {stem}", stem)


def _merges(words: Iterable[str], alphabet: list[str], num_merges: int) -> list[tuple[str, str]]:
    """Merges that make each word one token. Later ones never change an earlier word: it ends by its own merges."""
    ranks: dict[tuple[str, str], int] = {}
    for word in words:
        pieces = [alphabet[byte] for byte in word.encode()]
        while len(pieces) > 1:
            pair = min(zip(pieces, pieces[1:], strict=False), key=lambda p: ranks.get(p, num_merges))
            if pair not in ranks:
                if len(ranks) == num_merges:
                    return list(ranks)
                ranks[pair] = len(ranks)
            at = next(n for n in range(len(pieces)) if tuple(pieces[n : n + 2]) == pair)
            pieces[at : at + 2] = ["".join(pair)]
    raise ValueError(f"tiny tokenizer: words must give {num_merges} merges, found {len(ranks)}")
