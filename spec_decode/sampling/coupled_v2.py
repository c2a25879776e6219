"""Coupled sampling and verification behind vLLM's V2 runner: everything stays on the device.

Penalties, biases and exclusions are vLLM's kernels, which give a row the same bits whether the tokens before it are
drafts or not. The choice of a token is ours, for target and drafter alike.
"""

from dataclasses import dataclass

import numpy as np
import torch
from vllm.config import SpeculativeConfig
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from deepinfer_plugin.kernels.accept_drafts import accept_drafts
from deepinfer_plugin.spec_decode.sampling.choose import Limits, choose_tokens
from deepinfer_plugin.spec_decode.sampling.request import RequestSampling

BUILT_IN = 3  # the first of the sampler's processors are vLLM's own: biases and limits, penalties, bad words


@dataclass(frozen=True)
class DraftRows:
    """Rows of drafts that are being made, `length` of each request next to each other, as for the target's.

    slots: int64 [n * length], of the rows' requests; slots_np: of the n requests; inputs: int64 [n * length], each
    row's input token, of which those before the place that is chosen are known; positions: int64 [n * length], theirs.
    """

    slots: torch.Tensor
    slots_np: np.ndarray
    inputs: torch.Tensor
    positions: torch.Tensor
    length: int


class CoupledSampler(Sampler):
    """A request's token is a function of its seed, the position and its logits (`kernels/sample_tokens`)."""

    def __init__(self, vllms: Sampler) -> None:
        self.__dict__.update(
            vllms.__dict__
        )  # its states are the runner's, which has filled in what a model brings along
        self.adjusts = np.zeros_like(self.needs_logits_processing)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        super().add_request(req_idx, sampling_params)
        has_more = len(self.logits_processors) > BUILT_IN or sampling_params.thinking_token_budget is not None
        self.adjusts[req_idx] = has_more or RequestSampling(sampling_params, 0, ()).adjusts

    def sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        input_ids: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        return_logprobs: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's choice in every row, and the logits for processed log-probabilities."""
        context = LogitsContext(
            expanded_idx_mapping=expanded_idx_mapping,
            idx_mapping=idx_mapping,
            idx_mapping_np=idx_mapping_np,
            expanded_local_pos=expanded_local_pos,
            input_ids=input_ids,
            pos=pos,
            seq_lens_upper_bound_np=seq_lens_upper_bound_np,
        )
        logits = logits.float()
        adjusted = logits
        if self.adjusts[idx_mapping_np].any():
            adjusted = self._processed(logits.clone(), context, len(self.logits_processors))
            self.thinking_budget_state.apply(adjusted, context)
        tokens = choose_tokens(adjusted, self.limits(expanded_idx_mapping, idx_mapping_np), pos + 1)
        if self.return_sampling_mask or (return_logprobs and self.logprobs_mode in PROCESSED_LOGPROBS_MODES):
            return tokens, self._limited(adjusted, expanded_idx_mapping, idx_mapping_np)
        return tokens, logits

    def limits(self, slots: torch.Tensor, slots_np: np.ndarray) -> Limits:
        """Of the requests in these slots, one a row. slots_np: the same requests, in any order."""
        states = self.sampling_states
        return Limits(
            states.temperature.gpu[slots],
            states.seeds.gpu[slots],
            states.top_k.gpu[slots] if (states.top_k.np[slots_np] != states.vocab_size).any() else None,
            states.top_p.gpu[slots] if (states.top_p.np[slots_np] != 1).any() else None,
            states.min_p.gpu[slots] if (states.min_p.np[slots_np] != 0).any() else None,
        )

    def has_limits(self, slots_np: np.ndarray) -> bool:
        states = self.sampling_states
        return bool(
            (states.top_k.np[slots_np] != states.vocab_size).any()
            or (states.top_p.np[slots_np] != 1).any()
            or (states.min_p.np[slots_np] != 0).any()
        )

    def adjust_drafts(self, logits: torch.Tensor, place: int, rows: DraftRows) -> torch.Tensor:
        """`logits`, fp32 [n, vocab_size], of this place of every request, after vLLM's own processors.

        A user's processors and thinking budgets may count their calls, so they act on the target alone.
        """
        n, size = logits.shape
        everything = logits.new_zeros(n, rows.length, size)
        everything[:, place] = logits
        index = torch.arange(0, n * rows.length, rows.length, device=logits.device)
        context = LogitsContext(
            expanded_idx_mapping=rows.slots,
            idx_mapping=rows.slots[index],
            idx_mapping_np=rows.slots_np,
            expanded_local_pos=torch.arange(rows.length, dtype=torch.int32, device=logits.device).repeat(n),
            input_ids=rows.inputs,
            pos=rows.positions,
            seq_lens_upper_bound_np=np.full(n, self.req_states.max_model_len, dtype=np.int32),
        )
        return self._processed(everything.flatten(0, 1), context, BUILT_IN)[index + place]

    def _processed(self, logits: torch.Tensor, context: LogitsContext, count: int) -> torch.Tensor:
        for processor in self.logits_processors[:count]:
            logits = processor.apply(logits, context)
        return logits

    def _limited(self, adjusted: torch.Tensor, slots: torch.Tensor, slots_np: np.ndarray) -> torch.Tensor:
        states, logits = self.sampling_states, adjusted.clone()
        states.apply_temperature(logits, slots, slots_np)
        states.apply_min_p(logits, slots, slots_np)
        return states.apply_top_k_top_p(logits, slots, slots_np)


class CoupledVerification(RejectionSampler):
    """A draft counts if it is the target's own choice at its place."""

    sampler: CoupledSampler

    def __init__(self, sampler: CoupledSampler, spec_config: SpeculativeConfig, device: torch.device) -> None:
        super().__init__(sampler, spec_config, device)

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen, processed = self.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
            return_logprobs=True,
        )
        width = self.num_speculative_steps + 1
        tokens, emitted = accept_drafts(chosen, verify_draft_sampled, cu_num_logits, width)
        return processed, tokens, emitted
