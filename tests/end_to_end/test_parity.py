"""fp32 engine logits against the float64 oracle, however vLLM cuts the work. Rounding of activations and KV is off on
both sides, so that the only differences are fp32's.
"""

import pytest
import torch

from tests.end_to_end.conftest import ROUNDING_OFF, record, relative_error, start_engine, text_tokens
from tests.oracle.model import Oracle, no_rounding

# fp32 has 24 bits; 8 layers of sums over up to 384 products with random signs lose about 2**-24 * sqrt(384) each, and
# the head's largest logit is some 10 times the typical one. What is asked is 1e-4.
TOLERANCE = 1e-4
PROMPT = text_tokens(150)  # the window is 16, top-k acts beyond 16 entries, candidate blocks beyond 64


@pytest.fixture(scope="module")
def oracle(varied_checkpoint):
    return Oracle(varied_checkpoint, no_rounding)


@pytest.fixture(scope="module")
def wanted(oracle):
    return oracle.logits(PROMPT)


@pytest.fixture(scope="module")
def engine(varied_checkpoint):
    with start_engine(varied_checkpoint, ROUNDING_OFF) as engine:
        yield engine


@pytest.fixture(autouse=True)
def cold(request):
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").forget()


def prompt_logits(engine, prompt=PROMPT) -> torch.Tensor:
    """The logits of every position of the prompt."""
    (answer,) = engine.ask(prompt, prompt_logits=True)
    return torch.cat([answer.prompt_logits, answer.logits])


@pytest.fixture(scope="module")
def whole(engine):
    engine.forget()
    return prompt_logits(engine)


def check(case: str, got: torch.Tensor, want: torch.Tensor, whole: torch.Tensor | None = None, note: str = "") -> None:
    error = relative_error(got, want)
    record(case, error, None if whole is None else torch.equal(got, whole), note)
    assert error <= TOLERANCE
    if whole is not None:
        assert torch.equal(got, whole), "rows depend on how the prompt was cut"


def test_whole_prefill(whole, wanted):
    check("whole prefill", whole, wanted)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_prefill_in_chunks(engine, whole, wanted, chunk):
    with engine.chunks_of(chunk):
        check(f"chunks of {chunk}", prompt_logits(engine), wanted, whole)


def test_token_by_token_decode(engine, oracle):
    start = PROMPT[:3]
    (answer,) = engine.ask(start, max_tokens=140)
    wanted = oracle.logits(start + answer.token_ids)[2:-1]
    assert wanted.argmax(1).tolist() == answer.token_ids
    engine.forget()
    again = prompt_logits(engine, start + answer.token_ids)[2:-1]
    check("token-by-token decode", answer.logits, wanted, again)


def test_a_batch_of_unequal_requests(engine, whole, wanted):
    """Rows of prefill and decode of other requests in the same step."""
    others = [text_tokens(length, seed=length) for length in (2, 17, 90, 131)]
    answers = engine.ask(*others[:2], PROMPT, *others[2:], max_tokens=20)
    check("in a batch of 5", answers[2].logits[:1], wanted[-1:], whole[-1:])


@pytest.mark.parametrize(("shared", "cached"), [(150, 128), (100, 96), (40, 32)])
def test_prefix_hit(engine, oracle, whole, wanted, shared, cached):
    """The first prompt's blocks are used again, its window rows and open compression group included."""
    engine.ask(PROMPT[:shared] + text_tokens(30, seed=1))
    engine.ask(*(text_tokens(120, seed=seed) for seed in (2, 3)))  # these write into other blocks
    (answer,) = engine.ask(PROMPT)
    assert answer.num_cached_tokens == cached
    check(f"prefix hit of {cached}", answer.logits, wanted[-1:], whole[-1:])


def test_decode_after_a_prefix_hit(engine, oracle):
    first, second = (engine.ask(PROMPT, max_tokens=24)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 128)
    wanted = oracle.logits(PROMPT + second.token_ids)[149:-1]
    check("decode after a prefix hit", second.logits, wanted, first.logits)


def test_forced_preemption(varied_checkpoint, oracle):
    """Six requests that outgrow the cache together: the last are thrown out, and computed again."""
    prompts = [text_tokens(20, seed=seed) for seed in range(5, 11)]
    with start_engine(varied_checkpoint, ROUNDING_OFF, enable_prefix_caching=False) as roomy:
        apart = [roomy.ask(prompt, max_tokens=90)[0] for prompt in prompts]
        assert roomy.num_preemptions == 0
    with start_engine(varied_checkpoint, ROUNDING_OFF, num_gpu_blocks_override=64, max_model_len=192) as tight:
        together = tight.ask(*prompts, max_tokens=90)
        assert tight.num_preemptions > 0
        note = f"{tight.num_preemptions} preemptions"
    assert [got.token_ids for got in together] == [want.token_ids for want in apart]
    wanted = torch.cat([oracle.logits(p + got.token_ids)[19:-1] for p, got in zip(prompts, together, strict=True)])
    got, alone = (torch.cat([answer.logits for answer in answers]) for answers in (together, apart))
    check("forced preemption", got, wanted, alone, note)
