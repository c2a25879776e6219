"""The definition of `sample_tokens`: what every other module of this folder must equal.

A row at a time: on CPU the last bit of a logarithm may depend on an element's place in its tensor.
"""

import torch

from deepinfer_plugin.kernels.noise import log_race_time, words


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    stream: int,
) -> torch.Tensor:
    if not temperature.any():
        return logits.argmax(1)
    chosen = []
    noise = words(seeds, stream, positions, logits.shape[1])
    for row, heat in enumerate(temperature.tolist()):
        scores = logits[row].clone()
        if heat > 0:
            scores /= temperature[row]
            limits = (None if limit is None else limit[row].item() for limit in (top_k, top_p, min_p))
            scores = limited(scores, *limits)
            scores -= log_race_time(noise[row])
        chosen.append(scores.argmax())  # of equal scores the first
    return torch.stack(chosen) if chosen else positions.new_empty(0)


def limited(scores: torch.Tensor, top_k: float | None, top_p: float | None, min_p: float | None) -> torch.Tensor:
    """Scores with -inf where a limit forbids."""
    order = scores.sort(descending=True, stable=True).indices  # equal scores: the smaller id first
    if top_k is not None and 1 <= top_k < len(order):
        order = order[: int(top_k)]
    if top_p is not None and top_p < 1:
        share = scores[order].double().softmax(0)
        order = order[share.cumsum(0) - share < top_p]
    if min_p is not None and min_p > 0:
        order = order[scores[order].double().sub(scores[order[0]].double()).exp() >= min_p]
    return torch.full_like(scores, -torch.inf).index_copy_(0, order, scores[order])
