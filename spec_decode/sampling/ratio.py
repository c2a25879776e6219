"""The ratio test: a draft counts with probability p / q, and where it fails a token of the residual takes its place.

At every place that was drafted the draft is tested, also where the scheduler or a grammar ended the verified drafts:
the row of the last verified one has the probabilities of the place behind it. So a draft that a grammar forbids is
rejected with certainty and the residual drawn, which leaving it out would not do (runtime specification, sections 3.1
and 3.2).
"""

from dataclasses import dataclass

import torch

from deepinfer_plugin.kernels.noise import ACCEPTANCE, RESIDUAL, TARGET, log_race_time, words
from deepinfer_plugin.kernels.sample_tokens.reference import limited
from deepinfer_plugin.spec_decode.sampling.request import RequestSampling


@dataclass(frozen=True)
class Proposal:
    """Drafts of one request. start: position of the first; probabilities: fp32 [num_places, vocab_size], what each was
    drawn from."""

    start: int
    tokens: list[int]
    probabilities: torch.Tensor


def probabilities(logits: torch.Tensor, request: RequestSampling) -> torch.Tensor:
    """fp32 [vocab_size] -> the probabilities under the request's temperature and limits; one-hot at temperature 0."""
    p = request.params
    if p.temperature == 0:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1)
    return limited(logits / p.temperature, p.top_k, p.top_p, p.min_p).softmax(0)


def emit(
    logits: torch.Tensor, request: RequestSampling, start: int, verified: list[int], proposal: Proposal | None
) -> list[int]:
    """The tokens that a request emits in a round: accepted drafts, then one that is not a draft or the last of them.

    Args:
        logits: fp32 [1 + len(verified), vocab_size], adjusted: of the newest token's row, then of the verified drafts'.
        start: position of the first token that is chosen.
        verified: drafts that the target has computed, the first of the proposal's.
        proposal: None, or of another start, if this request was not drafted for.
    """
    if proposal is None or proposal.start != start:  # another proposer's drafts are certain to it
        size = len(verified), logits.shape[1]
        certain = torch.zeros(size).scatter_(1, torch.tensor(verified, dtype=torch.int64).unsqueeze(1), 1)
        proposal = Proposal(start, verified, certain)
    tokens: list[int] = []
    for place, row in enumerate(logits):
        target, position = probabilities(row, request), start + place
        if place == len(proposal.tokens):
            return [*tokens, _drawn(target, request, position, TARGET)]
        draft, drawn_from = proposal.tokens[place], proposal.probabilities[place]
        chance = (_word(request, position) + 0.5) / 2**32
        if chance * float(drawn_from[draft]) >= float(target[draft]):
            residual = (target - drawn_from).clamp(min=0)
            residual = residual if residual.any() else target  # equal but for their rounding
            return [*tokens, _drawn(residual, request, position, RESIDUAL)]
        tokens.append(draft)
    return tokens


def _word(request: RequestSampling, position: int) -> int:
    return int(words(torch.tensor([request.seed]), ACCEPTANCE, torch.tensor([position]), 1))


def _drawn(weights: torch.Tensor, request: RequestSampling, position: int, stream: int) -> int:
    """A token with probability proportional to its weight: the first in a race."""
    noise = words(torch.tensor([request.seed]), stream, torch.tensor([position]), len(weights))[0]
    return int((weights.log() - log_race_time(noise)).argmax())
