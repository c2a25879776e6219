"""The requests of a verification: texts and random tokens of many lengths, greedy and seeded, with every parameter."""

import random
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams

TEXTS = (
    "The sun was low over the harbour when the last of the boats came in, and nobody on the quay said a word.",
    "Copy this identifier exactly: k9-Zq4.x_77Lw0aPq-3f8e21bb90. The identifier is k9-Zq4.x_77Lw0aPq-3f8e21bb90",
    'Give me JSON for a person. {"name": "Greta", "age": 41, "city": "Oslo", "name": "Henry", "age": 27, "city":',
    "What is 17 + 58? It is 75. What is 23 + 44? It is 67. What is 81 - 36? It is 45. What is 12 + 29? It is",
    "To create an index on a table, use the CREATE INDEX statement. The name of the index must be unique in",
    "And it came to pass in those days, that there went out a decree, and all the people were numbered, and",
)
# what users combine with temperature; the first is greedy
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.2, "min_p": 0.05, "top_k": 100},
    {"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {5: 4.0, 9: -4.0}},
    {"temperature": 1.0, "min_tokens": 8},
)


@dataclass(frozen=True)
class VerifyRequest:
    prompt: list[int]
    params: SamplingParams


def make_requests(tokenizer: Any, vocab_size: int, count: int, max_tokens: int, longest: int) -> list[VerifyRequest]:
    """`count` requests, the same for the same arguments; prompts of 1 to `longest` tokens."""
    rng = random.Random(0)
    ordinary = sorted(set(range(vocab_size)) - set(tokenizer.all_special_ids))
    requests = []
    for n in range(count):
        length = rng.choice([1, 2, 7, 31, rng.randrange(1, longest + 1), longest])
        if n % 3 == 2:
            prompt = [rng.choice(ordinary) for _ in range(length)]
        else:
            text = tokenizer.encode(TEXTS[n % len(TEXTS)], add_special_tokens=False)
            prompt = (text * (length // len(text) + 1))[-length:]
        asked = SAMPLING[n % len(SAMPLING)]
        requests.append(VerifyRequest(prompt, SamplingParams(max_tokens=max_tokens, seed=n, **asked)))
    return requests
