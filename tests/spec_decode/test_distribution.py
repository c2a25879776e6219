"""What is emitted follows the target, whatever is drafted and however many drafts are verified.

Each claim has its control: a policy or rule that is known to bend the law, which the same test must see.
Source: runtime specification, sections 2.5, 2.9, 3.2 and 3.6.
"""

import math

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from deepinfer_plugin.kernels.noise import DRAFT
from deepinfer_plugin.spec_decode.sampling.choose import Rows, choose
from deepinfer_plugin.spec_decode.sampling.coupled import accepted
from deepinfer_plugin.spec_decode.sampling.ratio import Proposal, emit, probabilities
from deepinfer_plugin.spec_decode.sampling.request import RequestSampling
from deepinfer_plugin.spec_decode.verification.calibration import Calibration
from deepinfer_plugin.spec_decode.verification.cost_model import CostModel
from deepinfer_plugin.spec_decode.verification.schedule import Drafted, Load, WhatPays

UNLIKELY = 1e-4  # of a right law to look worse; the seeds are fixed, so the verdict is too
PLACES = 2


class Peeking(WhatPays):
    """Lets the current confidences decide how many drafts are verified: the mistake that the budget's age prevents."""

    def admit(self, drafted, load):
        confidence = self.calibration.confidence(drafted.logits)
        self._older = dict(zip(drafted.names, confidence, strict=True))
        return super().admit(drafted, load)


def policy_of(kind: type[WhatPays]) -> WhatPays:
    """One row costs 1.0, two and three 1.9 each."""
    cost = CostModel()
    for rows, seconds in ((1, 1.0), (2, 1.9), (3, 1.9)):
        cost.rows.start(rows, seconds)
    return kind(PLACES, cost, Calibration(PLACES))


def chance(counts: np.ndarray, law: np.ndarray) -> float:
    """Of a sample from `law` to lie as far from it as `counts`: Pearson's chi-square."""
    assert not counts[law == 0].any()
    counts, wanted = counts[law > 0], law[law > 0] * counts.sum()
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0), torch.tensor(statistic / 2)))


def test_the_statistic_knows_right_from_wrong():
    rng = np.random.default_rng(0)
    law = np.array([0.5, 0.3, 0.2])
    assert chance(rng.multinomial(20_000, law), law) > UNLIKELY
    assert chance(rng.multinomial(20_000, [0.52, 0.29, 0.19]), law) < UNLIKELY


def one(params: SamplingParams, seed: int) -> RequestSampling:
    return RequestSampling(params, seed, ())


def drawn(logits: torch.Tensor, request: RequestSampling, position: int) -> int:
    """A draft for the ratio test, which has noise of its own."""
    return int(choose(logits.unsqueeze(0), Rows([request], torch.tensor([position]), [None]), DRAFT))


def logit(confidence: float) -> float:
    return math.log(confidence / (1 - confidence)) if 0 < confidence < 1 else math.copysign(np.inf, confidence - 0.5)


@pytest.mark.parametrize(
    ("kind", "tests_all", "share"), [(WhatPays, False, 0.5), (Peeking, False, 0.75), (Peeking, True, 0.5)]
)
def test_a_fair_coin_stays_fair_unless_the_budget_peeks(kind, tests_all, share):
    """Drafts and target are fair coins; the second draft's confidence is 1 after a, 0 after b.

    To test also the draft behind the verified ones, as the engine does, closes this leak as well.
    """
    policy, load, coin = policy_of(kind), Load(1, 1, 0.0), torch.zeros(1 + PLACES, 2)
    rounds, heads = 4000, 0
    for seed in range(rounds):
        request = one(SamplingParams(), seed)
        tokens = [drawn(coin[0], request, place) for place in range(PLACES)]
        sure = np.array([[logit(0.6), logit(float(tokens[0] == 0))]])
        (count,) = policy.admit(Drafted(["a"], sure, np.array([PLACES])), load)
        tested = PLACES if tests_all else count
        proposal = Proposal(0, tokens[:tested], torch.full((tested, 2), 0.5))
        heads += emit(coin[: 1 + count], request, 0, tokens[:count], proposal)[0] == 0
    assert abs(heads / rounds - share) < 4 * math.sqrt(0.25 / rounds)


class Pair:
    """A target and a drafter over 4 tokens, whose laws depend on all tokens before."""

    size = 4

    def __init__(self, params: SamplingParams, difference: float = 1.0) -> None:
        self.params = params
        self.targets: dict[tuple[int, ...], torch.Tensor] = {}
        self.drafters: dict[tuple[int, ...], torch.Tensor] = {}
        generator = torch.Generator().manual_seed(3)
        for length in range(5):
            for prefix in np.ndindex(*[self.size] * length):
                self.targets[prefix] = torch.randn(self.size, generator=generator)
                self.drafters[prefix] = self.targets[prefix] + difference * torch.randn(self.size, generator=generator)

    def law(self, length: int) -> np.ndarray:
        """The probability of every text of `length` tokens: [size] * length."""
        law = np.ones([self.size] * length)
        for text in np.ndindex(law.shape):
            for n, token in enumerate(text):
                law[text] *= float(probabilities(self.targets[text[:n]].double(), one(self.params, 0))[token])
        return law / law.sum()

    def text(self, seed: int, length: int, policy: WhatPays, coupled: bool, tests_all: bool = True) -> list[int]:
        """Decoded with speculation. tests_all: whether the ratio test acts behind the verified drafts too."""
        request, text = one(self.params, seed), list[int]()
        while len(text) < length:
            drafts, sure, drawn_from = list[int](), list[float](), list[torch.Tensor]()
            for _ in range(PLACES):
                prefix = (*text, *drafts)
                # a function of the drafts before, as sharp as a confidence can be
                sure.append(logit([0.6, 0.0, 0.95, 1.0][sum(prefix) % 4]))
                logits = self.drafters[prefix]
                drawn_from.append(probabilities(logits, request))
                rows = Rows([request], torch.tensor([len(prefix)]), [None])
                drafts.append(int(choose(logits.unsqueeze(0), rows, 0 if coupled else DRAFT)))
            (count,) = policy.admit(Drafted(["a"], np.array([sure]), np.array([PLACES])), Load(1, 1, 0.0))
            verified = drafts[:count]
            logits = torch.stack([self.targets[(*text, *drafts[:n])] for n in range(count + 1)])
            if coupled:
                rows = Rows([request] * (count + 1), len(text) + torch.arange(count + 1), [None] * (count + 1))
                text += accepted(choose(logits, rows).tolist(), [verified])[0]
            else:
                tested = PLACES if tests_all else count
                proposal = Proposal(len(text), drafts[:tested], torch.stack(drawn_from[:tested]) if tested else None)
                text += emit(logits, request, len(text), verified, proposal)
        return text[:length]


LIMITS = [{}, {"top_k": 3}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.5, "min_p": 0.2}]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("coupled", [True, False], ids=["coupled", "ratio"])
def test_texts_follow_the_target(limits, coupled):
    pair, policy, counts = Pair(SamplingParams(**limits)), policy_of(WhatPays), np.zeros((4, 4))
    for seed in range(2000):
        counts[tuple(pair.text(seed, 2, policy, coupled))] += 1
    law = pair.law(2)
    assert chance(counts.flatten(), law.flatten()) > UNLIKELY
    for first in range(4):
        if counts[first].sum() > 100:
            assert chance(counts[first], law[first] / law[first].sum()) > UNLIKELY


def test_the_ratio_test_with_a_peeking_budget_is_caught():
    # a drafter close to its target, whose drafts are accepted: then it matters most which of them are tested
    pair, policy, counts = Pair(SamplingParams(), difference=0.2), policy_of(Peeking), np.zeros((4, 4))
    for seed in range(2000):
        counts[tuple(pair.text(seed, 2, policy, False, tests_all=False))] += 1
    assert chance(counts.flatten(), pair.law(2).flatten()) < UNLIKELY


@pytest.mark.parametrize("kind", [WhatPays, Peeking])
def test_coupled_texts_are_those_without_drafts_whatever_the_policy(kind):
    pair = Pair(SamplingParams())
    for seed in range(300):
        plain = list[int]()
        for position in range(3):
            rows = Rows([one(pair.params, seed)], torch.tensor([position]), [None])
            plain.append(int(choose(pair.targets[tuple(plain)].unsqueeze(0), rows)))
        assert pair.text(seed, 3, policy_of(kind), True) == plain


@pytest.mark.parametrize(("keeps_the_draft", "share"), [(True, 0.5), (False, 0.75)])
def test_a_draft_that_a_grammar_forbids_is_rejected_not_left_out(keeps_the_draft, share):
    """Of a, b, c: the drafter's law (1/2, 0, 1/2), the target's under the grammar (1/2, 1/2, 0)."""
    drafter, target = torch.tensor([0.5, 0, 0.5]), torch.tensor([0.5, 0.5, 0]).log()
    rounds, first = 4000, 0
    for seed in range(rounds):
        request = one(SamplingParams(), seed)
        token = drawn(drafter.log(), request, 0)
        verified = [] if token == 2 else [token]  # vLLM cuts drafts at the first that is forbidden
        proposal = Proposal(0, [token], drafter.unsqueeze(0)) if keeps_the_draft or verified else None
        first += emit(target.repeat(1 + len(verified), 1), request, 0, verified, proposal)[0] == 0
    assert abs(first / rounds - share) < 4 * math.sqrt(0.25 / rounds)
