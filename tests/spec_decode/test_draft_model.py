"""The draft network in the engine against the float64 oracle: logits and confidences of whole rounds.

Rounding is off on both sides, so that the only differences are fp32's, and draft lengths are those of a user.
"""

from itertools import product

import pytest

from deepinfer_plugin.spec_decode.dspark.draft_model import DSparkV41DraftModel
from tests.end_to_end.conftest import ROUNDING_OFF, start_engine, text_tokens
from tests.oracle.draft import draft
from tests.oracle.model import Oracle, no_rounding

TOLERANCE = 1e-4  # of the largest logit: as for the target, tests/end_to_end/test_parity.py
PROMPTS = [text_tokens(40, seed=1), text_tokens(3, seed=2), text_tokens(90, seed=3)]  # the window is 16


@pytest.fixture(scope="module")
def oracle(varied_checkpoint):
    return Oracle(varied_checkpoint, no_rounding)


@pytest.fixture
def places(monkeypatch):
    """Of every place that the engine drafts: its anchor, the token before it, its logits and its confidence's logit."""
    seen, anchor, original, forward = [], [], DSparkV41DraftModel.markov, DSparkV41DraftModel.forward

    def anchored(self, input_ids, step, anchors, length):
        anchor[:] = [int(anchors[0])]
        return forward(self, input_ids, step, anchors, length)

    def recorded(self, base, hidden_states, previous):
        logits, confidence = original(self, base, hidden_states, previous)
        seen.append((anchor[0], previous.clone(), logits.clone(), confidence.clone()))
        return logits, confidence

    monkeypatch.setattr(DSparkV41DraftModel, "forward", anchored)
    monkeypatch.setattr(DSparkV41DraftModel, "markov", recorded)
    return seen


@pytest.mark.parametrize("length", [1, 3, 4])
def test_equals_the_oracle(length, varied_checkpoint, oracle, places):
    speculation = {"method": "dspark", "num_speculative_tokens": length}
    options = ROUNDING_OFF | {"scheduled_verification": False}  # drafts in every round
    with start_engine(varied_checkpoint, options, speculative_config=speculation) as engine:
        for prompt, chunk in product(PROMPTS, (1024, 7)):
            engine.forget()
            places.clear()
            with engine.chunks_of(chunk):
                (answer,) = engine.ask(prompt, max_tokens=6)
            assert places[0][0] == len(prompt) - 1
            check(oracle, prompt + answer.token_ids, length, places)


def check(oracle: Oracle, tokens: list[int], length: int, places: list) -> None:
    """Every round that the engine drafted for this request."""
    for first in range(0, len(places), length):
        anchor = places[first][0]
        want = draft(oracle, tokens[: anchor + 1], tokens[anchor + 1], length)
        largest = float(want.logits.abs().max())
        before = [tokens[anchor + 1], *want.tokens]
        for place, (_, previous, logits, confidence) in enumerate(places[first : first + length]):
            assert int(previous) == before[place]
            assert (logits[0].double() - want.logits[place]).abs().max() <= TOLERANCE * largest
            assert abs(float(confidence) - float(want.confidence[place])) <= TOLERANCE * largest
