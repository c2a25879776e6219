"""A round of drafting, whoever runs it: one pass of the draft network, then its heads from place to place."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepinfer_plugin.model_executor.caches.metadata import Step
from deepinfer_plugin.spec_decode.dspark.draft_model import DSparkV41DraftModel

# (logits of one place, fp32 [n, vocab_size]; the tokens drafted before it, int64 [n, place]) -> tokens, int64 [n]
Chooser = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Drafts:
    """tokens: int64 [n, length]; confidence: fp32 [n, length], logits of the chance that a draft is accepted if all
    before it are. A confidence depends on the drafts before its place, not on the draft at it."""

    tokens: torch.Tensor
    confidence: torch.Tensor


def draft(
    model: DSparkV41DraftModel,
    step: Step,
    golden: torch.Tensor,
    anchors: torch.Tensor,
    length: int,
    choose: Chooser,
) -> Drafts:
    """Draft `length` tokens for each of n requests.

    Args:
        step: positions and requests of the n * length drafted rows, and the block tables of the draft blocks' caches.
        golden: int64 [n], each request's newest token, which the target has not processed.
        anchors: int64 [n], the position of the token before it.
        choose: decides a place's tokens.

    Source: model specification, sections 6.3 and 6.4.
    """
    ids = golden.new_full((len(golden), length), model.shape.dspark_noise_token_id)
    ids[:, 0] = golden
    hidden = model(ids.flatten(), step, anchors.repeat_interleave(length), length)
    base = model.base_logits(hidden).unflatten(0, (-1, length))
    hidden = hidden.unflatten(0, (-1, length))
    tokens, confidence, previous = golden.new_empty(len(golden), length), [], golden
    for place in range(length):
        logits, sure = model.markov(base[:, place], hidden[:, place], previous)
        previous = tokens[:, place] = choose(logits, tokens[:, :place])
        confidence.append(sure)
    return Drafts(tokens, torch.stack(confidence, 1))


def drafted_positions(anchors: torch.Tensor, length: int) -> torch.Tensor:
    """int64 [n * length]: the positions of the rows of a block, each request's next to each other."""
    steps = torch.arange(1, length + 1, device=anchors.device)
    return (anchors.unsqueeze(1) + steps).flatten()
