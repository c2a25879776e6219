"""What one request asks of its sampling, as a function of its own tokens alone. The same acts on target and drafter."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.utils import apply_penalties
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.bad_words import apply_bad_words

SEED_BITS = 1 << 64


@dataclass(frozen=True)
class RequestSampling:
    """seed: 64 bits, as a signed number; prompt: the request's prompt, for the repetition penalty."""

    params: SamplingParams
    seed: int
    prompt: Sequence[int]

    @property
    def adjusts(self) -> bool:
        """Whether logits must be changed before a token is chosen, so that the tokens before it are needed."""
        p = self.params
        return bool(p.allowed_token_ids or p.bad_words_token_ids or p.logit_bias or p.min_tokens or self.penalises)

    @property
    def penalises(self) -> bool:
        p = self.params
        return p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1

    def adjust(self, logits: torch.Tensor, output: Sequence[int]) -> None:
        """Change `logits` in place, in vLLM's order.

        Args:
            logits: fp32 [vocab_size], of the token that follows `output`.
            output: all tokens that were generated before it, drafts included.
        """
        p, row = self.params, logits.unsqueeze(0)
        if p.allowed_token_ids:
            forbidden = torch.ones_like(logits, dtype=torch.bool)
            forbidden[torch.tensor(p.allowed_token_ids, device=logits.device)] = False
            logits.masked_fill_(forbidden, -torch.inf)
        if p.bad_words_token_ids:
            apply_bad_words(row, {0: p.bad_words_token_ids}, [list(output)])
        if p.min_tokens > len(output) and p.all_stop_token_ids:
            logits[torch.tensor(sorted(p.all_stop_token_ids), device=logits.device)] = -torch.inf
        if p.logit_bias:
            at = torch.tensor(list(p.logit_bias), device=logits.device)
            logits[at] += torch.tensor(list(p.logit_bias.values()), device=logits.device)
        if self.penalises:
            tokens = (
                torch.tensor([list(ids)], device=logits.device, dtype=torch.int64) for ids in (self.prompt, output)
            )
            values = (p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
            apply_penalties(row, *tokens, *(torch.tensor([value], device=logits.device) for value in values))


class Seeds:
    """Seeds for requests that have none, from the engine's: equal on all ranks, which admit in the same order."""

    def __init__(self, engine_seed: int) -> None:
        self._random = random.Random(engine_seed)

    def of(self, params: SamplingParams) -> int:
        """The request's own seed if it has one, as a signed number of 64 bits."""
        seed = self._random.getrandbits(64) if params.seed is None else params.seed % SEED_BITS
        return seed - SEED_BITS if seed >= SEED_BITS // 2 else seed
