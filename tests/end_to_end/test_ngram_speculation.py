"""vLLM's n-gram speculation over our caches: rejected drafts leave no trace, the text is the same bit by bit."""

import pytest
import torch

from tests.end_to_end.conftest import start_engine, text_tokens
from tests.end_to_end.run_engine import run_engine

PHRASE = text_tokens(9, seed=4)
PROMPTS = [PHRASE * 8, text_tokens(50), PHRASE * 3 + text_tokens(7)]
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def test_drafts_do_not_change_tokens_or_logits(tiny_checkpoint, tmp_path):
    with start_engine(tiny_checkpoint) as plain:
        want = plain.ask(*PROMPTS, max_tokens=60)
    # vLLM's proposer imports numba, after which no further engine can start in a process
    got = run_engine(tiny_checkpoint, tmp_path / "out.pt", PROMPTS, max_tokens=60, speculative_config=SPECULATION)
    drafted = got["counts"]["vllm:spec_decode_num_draft_tokens"]
    assert drafted > 20, "nothing was speculated"
    assert got["counts"]["vllm:spec_decode_num_accepted_tokens"] < drafted, "no draft was rejected"
    assert got["tokens"] == [answer.token_ids for answer in want]
    for logits, answer in zip(got["logits"], want, strict=True):
        assert torch.equal(logits, answer.logits)


def test_speculation_with_a_draft_model_is_refused_by_name(tiny_checkpoint):
    options = {"method": "custom_class", "model": "some.Proposer", "num_speculative_tokens": 2}
    with (
        pytest.raises(Exception, match="method custom_class, only ngram, dspark"),
        start_engine(tiny_checkpoint, speculative_config=options),
    ):
        pass
