"""The log-probabilities that requests ask for, of the tokens that they emitted, in the layout of vLLM's V1 runner."""

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from deepinfer_plugin.kernels.sample_tokens.reference import limited
from deepinfer_plugin.spec_decode.sampling.request import RequestSampling


def gather_logprobs(
    sampler: Sampler,
    metadata: SamplingMetadata,
    raw: torch.Tensor,
    adjusted: torch.Tensor,
    requests: list[RequestSampling],
    emitted: torch.Tensor,
    first_rows: list[int],
) -> LogprobsTensors | None:
    """Logprobs of the emitted tokens, one row for each place of `emitted`; None if nobody asks.

    Args:
        raw, adjusted: fp32 [num_rows, vocab_size], as the model computed them and after `RequestSampling.adjust`.
        requests: the request of every row.
        emitted: int32 [num_requests, width], negative where a request emitted fewer.
        first_rows: of each request; its other rows follow.
    """
    wanted, specific = metadata.max_num_logprobs, metadata.logprob_token_ids
    if wanted is None and not specific:
        return None
    width, last = emitted.shape[1], len(raw) - 1
    rows = torch.tensor([min(first + place, last) for first in first_rows for place in range(width)])
    mode = sampler.logprobs_mode
    values = raw[rows] if mode.startswith("raw") else _limited(adjusted, requests)[rows]
    if mode.endswith("logprobs"):
        values = sampler.compute_logprobs(values)
    tokens = emitted.flatten().clamp(min=0).long()
    if specific:
        each = {request * width + place: ids for request, ids in specific.items() for place in range(width)}
        return sampler.gather_specific_token_logprobs(values, each, tokens)
    if wanted == -1:
        return LogprobsTensors(torch.empty(0), values, torch.empty(0))
    return sampler.gather_logprobs(values, wanted, tokens)


def _limited(logits: torch.Tensor, requests: list[RequestSampling]) -> torch.Tensor:
    """Logits over temperature, -inf where a limit forbids; greedy rows as they are."""
    rows = []
    for row, request in zip(logits, requests, strict=True):
        p = request.params
        rows.append(limited(row / p.temperature, p.top_k, p.top_p, p.min_p) if p.temperature > 0 else row)
    return torch.stack(rows)
