"""One bad request fails alone, with a message that says what is wrong; the engine serves the next one."""

import pytest
from vllm.exceptions import VLLMValidationError

from tests.end_to_end.conftest import VOCABULARY, start_engine, text_tokens

GOOD = text_tokens(20)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    with start_engine(tiny_checkpoint, max_model_len=128) as engine:
        yield engine


@pytest.fixture(scope="module")
def answer(engine):
    return engine.ask(GOOD, max_tokens=4)[0].token_ids


@pytest.fixture(autouse=True)
def still_serving(engine, answer):
    yield
    assert engine.ask(GOOD, max_tokens=4)[0].token_ids == answer
    assert not engine.llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (text_tokens(200), "128.*200|200.*128"),
        ([], "empty"),
        ([5, VOCABULARY, 6], f"{VOCABULARY} is out of vocabulary"),
        ([5, 10**7, 6], f"{10**7} is out of vocabulary"),
        ([5, -1, 6], "-1"),
    ],
    ids=["too long", "empty", "first id past the vocabulary", "id far out", "negative id"],
)
def test_a_bad_prompt_is_refused(engine, prompt, message):
    with pytest.raises(VLLMValidationError, match=message):
        engine.ask(prompt)


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "(unclosed"},
        {"grammar": "root ::= undefined_rule"},
        {"json": '{"type": "no such type"}'},
        {"json": "{not json"},
    ],
    ids=lambda g: f"{next(iter(g))}",
)
def test_a_grammar_that_cannot_compile_is_refused(engine, grammar):
    from vllm.sampling_params import StructuredOutputsParams

    with pytest.raises(VLLMValidationError, match=r"[Gg]rammar|regex|[Jj][Ss][Oo][Nn]|schema"):
        engine.ask(GOOD, max_tokens=8, structured_outputs=StructuredOutputsParams(**grammar))


def test_a_good_grammar_is_followed(engine):
    import re

    from vllm.sampling_params import StructuredOutputsParams

    params = StructuredOutputsParams(regex="[0-9]{4}-[ab]")
    (answer,) = engine.ask(GOOD, max_tokens=20, structured_outputs=params, ignore_eos=False)
    text = engine.llm.get_tokenizer().decode(answer.token_ids, skip_special_tokens=True)
    assert re.fullmatch("[0-9]{4}-[ab]", text)


def test_an_aborted_request_frees_its_blocks(engine):
    from vllm import SamplingParams

    engine.forget()
    before, core = engine.num_free_blocks, engine.llm.llm_engine
    for name in ("stays", "goes"):
        core.add_request(name, {"prompt_token_ids": text_tokens(60)}, SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(3):
        core.step()
    both = before - engine.num_free_blocks
    core.abort_request(["goes"])
    core.step()
    one = before - engine.num_free_blocks
    assert 0 < one < both
    while core.has_unfinished_requests():
        core.step()
    assert engine.num_free_blocks == before
