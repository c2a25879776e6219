"""The trained tiny checkpoint behaves like a language model, and its text does not depend on how the work is cut."""

import json

import pytest

from deepinfer_plugin.model_executor.models.tiny import TRAINED
from tests.end_to_end.conftest import Engine, start_engine

PROMPTS = [
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of",
    "Call me Ishmael. Some years ago - never mind how long precisely - having little or no money in my purse, I",
    "The CREATE INDEX statement creates an index on a table. The index may be used by the query planner to",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want",
]
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Henry", "Ida", "Jack"]
CITIES = ["Paris", "Rome", "Oslo", "Cairo", "Lima"]


@pytest.fixture(scope="module")
def engine():
    with start_engine(TRAINED, max_logprobs=5, logprobs_mode="raw_logprobs") as started:
        yield started


def continuations(engine: Engine) -> list[list[int]]:
    from vllm import SamplingParams

    outputs = engine.llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_greedy_text_is_stable_across_chunks_and_prefix_hits(engine):
    engine.forget()
    whole = continuations(engine)
    assert continuations(engine) == whole  # prefix hits
    for chunk in (7, 32):
        engine.forget()
        with engine.chunks_of(chunk):
            assert continuations(engine) == whole, f"chunks of {chunk}"


def test_the_text_is_english(engine):
    """Random weights give noise; a fifth of the words of any English text are among these."""
    text = "".join(engine.llm.get_tokenizer().decode(tokens) for tokens in continuations(engine))
    words = text.lower().split()
    common = {"the", "of", "and", "to", "a", "in", "that", "is", "was", "it", "be", "i", "not", "for", "with", "which"}
    assert sum(word in common for word in words) > len(words) / 5, text


def test_json_prompts_give_valid_json_without_a_grammar(engine, record_property):
    from vllm import SamplingParams

    people = [(name, 20 + 7 * n, city) for n, city in enumerate(CITIES) for name in NAMES]
    conversations = [
        [
            {
                "role": "user",
                "content": f"Give me JSON for a person: {n}, {a} years old, from {c}. Keys: name, age, city.",
            }
        ]
        for n, a, c in people
    ]
    sampling = SamplingParams(temperature=1.0, seed=0, max_tokens=60)
    outputs = engine.llm.chat(conversations, sampling, use_tqdm=False, chat_template_kwargs={"thinking": False})
    valid = right = 0
    for (name, age, city), output in zip(people, outputs, strict=True):
        try:
            answer = json.loads(output.outputs[0].text)
        except ValueError:
            continue
        valid += 1
        right += answer == {"name": name, "age": age, "city": city}
    record_property("valid_json_of_50", valid)
    print(f"{valid} of 50 are valid JSON, {right} with the right content")
    assert valid > 25
