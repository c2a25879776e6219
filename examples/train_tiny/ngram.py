"""A 5-gram model over the same tokens: interpolated Kneser-Ney, the floor that a network has to beat.

Source: Chen and Goodman, An empirical study of smoothing techniques for language modeling, 1999, section 2.7.
"""

import numpy as np
from tqdm import tqdm

DISCOUNT = 0.75


class KneserNey:
    """Counts of `tokens`; `log_probabilities` reads them. All tables are sorted arrays of n-gram codes."""

    def __init__(self, tokens: np.ndarray, vocab_size: int, order: int = 5) -> None:
        self.vocab_size, self.order = vocab_size, order
        assert order * np.log2(vocab_size) < 63, "an n-gram must fit into an integer of 63 bits"
        self.grams: list[tuple[np.ndarray, np.ndarray]] = []  # by order: codes, counts (of continuations below the top)
        self.contexts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # codes, sum of counts, distinct followers
        codes, counts = np.unique(self._codes(tokens, order), return_counts=True)
        for n in tqdm(range(order, 0, -1), desc="5-gram counts", unit=" orders"):
            self.grams.insert(0, (codes, counts))
            context, start = np.unique(codes // vocab_size, return_index=True)
            sums = np.add.reduceat(counts, start)
            self.contexts.insert(0, (context, sums, np.diff(np.append(start, len(codes)))))
            # below the top order a gram counts the different words that were seen before it
            codes, counts = np.unique(codes % vocab_size ** (n - 1), return_counts=True)

    def log_probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """Natural logarithms for tokens[order - 1:], each given the order - 1 tokens before it."""
        probability = np.full(len(tokens) - self.order + 1, 1 / self.vocab_size)
        for n in range(1, self.order + 1):
            codes = self._codes(tokens[self.order - n :], n)
            count = _found(*self.grams[n - 1], codes)
            context, sums, distinct = self.contexts[n - 1]
            total, kinds = (
                _found(context, sums, codes // self.vocab_size),
                _found(context, distinct, codes // self.vocab_size),
            )
            seen = total > 0
            discounted = np.maximum(count - DISCOUNT, 0) + DISCOUNT * kinds * probability
            probability = np.where(seen, discounted / np.maximum(total, 1), probability)
        return np.log(probability)

    def _codes(self, tokens: np.ndarray, n: int) -> np.ndarray:
        """The code of every run of `n` tokens; the last token is the lowest digit."""
        tokens = tokens.astype(np.int64)
        codes = np.zeros(len(tokens) - n + 1, dtype=np.int64)
        for k in range(n):
            codes = codes * self.vocab_size + tokens[k : len(tokens) - n + 1 + k]
        return codes


def _found(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
