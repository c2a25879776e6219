"""`deepinfer-plugin verify` finds what it is there to find: each kind of mistake, built in, ends it with status 1."""

import json
from pathlib import Path

import pytest
import torch

import deepinfer_plugin.model_executor.models as models
from deepinfer_plugin.__main__ import main
from deepinfer_plugin.spec_decode import runner_v1
from deepinfer_plugin.spec_decode.verification import state
from deepinfer_plugin.spec_decode.verification.schedule import AnyNumber
from deepinfer_plugin.verify import run
from deepinfer_plugin.verify.cases import PREEMPTED, Case, with_drafts, without_drafts
from deepinfer_plugin.verify.requests import SAMPLING
from deepinfer_plugin.verify.run import Result, compare, first_difference

TRAINED = str(Path(models.__file__).parent / "tiny_trained")
ENGINE = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}


@pytest.fixture
def cases(monkeypatch):
    """A few cases instead of all: call with those without and those with drafts."""

    def choose(plain, drafted):
        monkeypatch.setattr(run, "without_drafts", lambda: plain)
        monkeypatch.setattr(run, "with_drafts", lambda most: drafted)

    return choose


def verify(capsys, engine=ENGINE, requests=9):
    status = main(["verify", TRAINED, "--json", "--requests", str(requests), "--engine", json.dumps(engine)])
    out = capsys.readouterr().out
    return status, json.loads(out[out.index("[\n") :])


PLAIN = Case("batches of 1", 0, running=1)
RANDOM = Case("random budgets", 5, ("random", {"seed": 0}), running=3)


def test_nothing_differs(cases, capsys):
    cases(
        [PLAIN, Case("chunks of 7", 0, rows=7)], [RANDOM, Case("preemptions", 5, preempt_every=6, shown_by=PREEMPTED)]
    )
    status, results = verify(capsys)
    assert status == 0
    assert [(result["mismatches"], result["holds"]) for result in results] == [(0, True)] * 4
    assert results[2]["drafts"] > 0


def test_a_verification_that_accepts_too_much_is_found(cases, capsys, monkeypatch):
    def trusting(chosen, drafts):
        """Every draft counts: what a rejection rule with a hole does."""
        ends = torch.tensor([len(own) + 1 for own in drafts]).cumsum(0).tolist()
        return [[*own, chosen[end - 1]] for own, end in zip(drafts, ends, strict=True)]

    monkeypatch.setattr(runner_v1, "accepted", trusting)
    cases([PLAIN], [RANDOM])
    status, results = verify(capsys)
    assert status == 1 and results[0]["mismatches"] == 0 and results[1]["mismatches"] > 0
    request, place = results[1]["first"]
    assert 0 <= request < len(SAMPLING) and place >= 1


class Peeking(AnyNumber):
    """Drafts are verified if their own confidences are high."""

    def admit(self, drafted, load):
        return ((drafted.logits > 0).cumprod(1).sum(1)).clip(max=drafted.room).tolist()


@pytest.mark.parametrize("policy", [AnyNumber, Peeking])
def test_the_ratio_test_keeps_no_text_with_a_policy_that_peeks_or_without(policy, cases, capsys, monkeypatch):
    """Whether it keeps the law is for tests/spec_decode/test_distribution.py; to coupled texts a policy is nothing."""
    monkeypatch.setattr(state, "AnyNumber", policy)
    cases([PLAIN], [RANDOM])
    status, results = verify(capsys, ENGINE | {"additional_config": {"deepinfer": {"verification": "ratio"}}})
    assert status == 1 and results[1]["mismatches"] > 0
    status, results = verify(capsys)
    assert status == 0 and results[1]["drafts"] > 0


def test_a_kernel_that_sees_its_batch_is_found(cases, capsys, monkeypatch):
    choose = runner_v1.choose

    def batched(logits, rows, *stream):
        """Another rounding when there are more rows, as from a matrix product that picks its tiles by size."""
        return choose(logits if len(logits) < 3 else logits.bfloat16().float(), rows, *stream)

    monkeypatch.setattr(runner_v1, "choose", batched)
    cases([PLAIN, Case("batches of 16", 0)], [])
    status, results = verify(capsys, requests=18)
    assert status == 1 and results[1]["mismatches"] > 0


def test_a_case_that_did_not_happen_does_not_pass():
    case = Case("preemptions", 5, shown_by=PREEMPTED)
    assert not compare(case, [[1]], [[1]], {}).holds
    assert compare(case, [[1]], [[1]], {PREEMPTED: 2}).holds
    assert not compare(case, [[1]], [[2]], {PREEMPTED: 2}).holds


def test_the_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 3], [1, 2]) == 1
    assert first_difference([1], [1, 2]) == 1


def test_every_way_of_the_issue_is_a_case():
    cases = without_drafts() + with_drafts(5)
    assert {case.drafts for case in cases} == set(range(6))
    for drafts in (0, 5):
        own = [case for case in cases if case.drafts == drafts]
        assert {1, 2, 4, 16} <= {case.running for case in own}
        assert any(case.rows for case in own) and any(case.again for case in own)
        assert any(case.preempt_every for case in own)
    assert any(case.schedule[0] == "random" for case in cases) and any(case.schedule[0] == "pays" for case in cases)


def test_a_line_of_the_table_names_the_first_difference():
    assert "request 3 from token 5" in Result("a", 9, 90, 0, 2, (3, 5), None).line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "--requests: must be a number from 1 on, got '0'"),
        (["--engine", "{"], "--engine: must be JSON, got '{'"),
        (["--engine", "[]"], "--engine: must be a JSON object"),
    ],
)
def test_mistakes_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["verify", TRAINED, *arguments])
    assert message in capsys.readouterr().err


def test_requests_must_fit_into_the_context(cases):
    cases([PLAIN], [])
    with pytest.raises(ValueError, match="max_tokens must be below max_model_len = 512"):
        main(["verify", TRAINED, "--max-tokens", "512", "--engine", json.dumps(ENGINE)])
