"""DSpark behind vLLM's V1 runner, which is the one for CPUs: sampling, verification and drafting of a step."""

from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import get_model
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from deepinfer_plugin.model_executor.caches.metadata import CacheMetadata, Step
from deepinfer_plugin.spec_decode.dspark.draft_model import DSparkV41DraftModel
from deepinfer_plugin.spec_decode.dspark.proposer import Drafts, draft, drafted_positions
from deepinfer_plugin.spec_decode.sampling.choose import Rows, adjusted, choose
from deepinfer_plugin.spec_decode.sampling.coupled import accepted, as_matrix
from deepinfer_plugin.spec_decode.sampling.logprobs import gather_logprobs
from deepinfer_plugin.spec_decode.sampling.request import RequestSampling, Seeds

# what `RequestSampling.adjust` and `choose` do themselves, for target and drafter alike
OURS = (LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor)


class DSparkProposer:
    """What vLLM builds for the method "custom_class": holds the draft network."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config

    def load_model(self, target: nn.Module) -> None:
        config = self.vllm_config.speculative_config.draft_model_config
        self.model: DSparkV41DraftModel = get_model(vllm_config=self.vllm_config, model_config=config)
        self.model.follow(target)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        raise RuntimeError("DSpark on CPU: drafts are made by deepinfer-plugin's worker, leave --worker-cls alone")


class DeepInferCPURunner(CPUModelRunner):
    """vLLM's runner with coupled sampling, and with DSpark's drafts where it is the speculation's method."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.seeds = Seeds(self.model_config.seed)
        self.asked: dict[str, RequestSampling] = {}

    def _update_states(self, scheduler_output: Any) -> Any:
        for name in scheduler_output.finished_req_ids:
            self.asked.pop(name, None)
        return super()._update_states(scheduler_output)

    def sampling_of(self, name: str) -> RequestSampling:
        if name not in self.asked:
            state = self.requests[name]
            seed = self.seeds.of(state.sampling_params)
            self.asked[name] = RequestSampling(state.sampling_params, seed, state.prompt_token_ids or ())
        return self.asked[name]

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        """The target's choice in every row; drafts count up to the first that differs from it."""
        drafts: list[list[int]] = [[] for _ in self.input_batch.req_ids]
        if spec_decode_metadata is not None:
            flat = spec_decode_metadata.draft_token_ids.tolist()
            ends = np.cumsum(spec_decode_metadata.num_draft_tokens).tolist()
            drafts = [flat[end - n : end] for n, end in zip(spec_decode_metadata.num_draft_tokens, ends, strict=True)]
        rows, first_rows = self._rows(drafts)
        raw = logits.float()
        changed = self._processed(adjusted(raw, rows), drafts, first_rows)
        emitted = as_matrix(accepted(choose(changed, rows).tolist(), drafts), 1 + max(map(len, drafts)))
        metadata, requests = self.input_batch.sampling_metadata, list(rows.requests)
        return SamplerOutput(
            emitted, gather_logprobs(self.sampler, metadata, raw, changed, requests, emitted, first_rows)
        )

    def _rows(self, drafts: list[list[int]]) -> tuple[Rows, list[int]]:
        """The rows of logits: for each request that of its newest token, then its drafts'; and each one's first."""
        requests: list[RequestSampling] = []
        positions: list[int] = []
        outputs: list[list[int] | None] = []
        first_rows: list[int] = []
        for index, (name, own) in enumerate(zip(self.input_batch.req_ids, drafts, strict=True)):
            request, before = self.sampling_of(name), self.requests[name].output_token_ids
            known = int(self.input_batch.num_tokens_no_spec[index])
            first_rows.append(len(requests))
            for place in range(len(own) + 1):
                requests.append(request)
                positions.append(known + place)
                outputs.append([*before, *own[:place]] if request.adjusts else None)
        return Rows(requests, torch.tensor(positions), outputs), first_rows

    def _processed(self, logits: torch.Tensor, drafts: list[list[int]], first_rows: list[int]) -> torch.Tensor:
        """`logits` after a user's own processors and thinking budgets, whose requests are never drafted for."""
        metadata = self.input_batch.sampling_metadata
        holder, processors = metadata.thinking_budget_state_holder, self.input_batch.logitsprocs
        invariant = [p for p in processors.argmax_invariant if not isinstance(p, OURS)]
        variant = [p for p in processors.non_argmax_invariant if not isinstance(p, OURS)]
        has_budgets = holder is not None and holder.has_tracked_requests()
        if not (has_budgets or invariant or variant):
            return logits
        rows = torch.tensor([first + len(own) for first, own in zip(first_rows, drafts, strict=True)])
        last = logits[rows]
        for processor in variant:
            last = processor.apply(last)
        if invariant:  # these expect logits over temperature
            heat = torch.where(metadata.temperature > 0, metadata.temperature, 1).unsqueeze(1)
            last = last / heat
            for processor in invariant:
                last = processor.apply(last)
            last = last * heat
        if has_budgets:
            holder.update_state(metadata.output_token_ids, metadata.spec_token_ids, repeat_indices=None)
            last = holder.apply_to_logits(last, False, metadata.spec_token_ids)
        return logits.index_copy(0, rows, last)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        if not isinstance(getattr(self, "drafter", None), DSparkProposer):
            return super()._input_fits_in_drafter(common_attn_metadata)
        return common_attn_metadata is not None  # a request near its end gets fewer drafts, by itself

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: Any, *args: Any
    ) -> list[list[int]] | torch.Tensor:
        """Drafts for every request that has just sampled a token; none for the others."""
        if not isinstance(self.drafter, DSparkProposer):
            return super().propose_draft_token_ids(scheduler_output, sampled_token_ids, *args)
        known = self.input_batch.num_tokens_no_spec
        room = self.max_model_len - 1 - known  # vLLM cuts what `max_tokens` leaves unused
        drafting = [n for n, new in enumerate(sampled_token_ids) if new and room[n] > 0 and self._may_draft(n)]
        proposed: list[list[int]] = [[] for _ in sampled_token_ids]
        if drafting:
            drafts = self._draft(drafting)
            for n, tokens in zip(drafting, drafts.tokens.tolist(), strict=True):
                proposed[n] = tokens[: room[n]]
        return proposed

    def _may_draft(self, index: int) -> bool:
        return self.requests[self.input_batch.req_ids[index]].sampling_params.thinking_token_budget is None

    def _draft(self, drafting: list[int]) -> Drafts:
        """Drafts for the requests at these places of the batch."""
        batch, length, model = self.input_batch, self.num_spec_tokens, self.drafter.model
        names = [batch.req_ids[n] for n in drafting]
        requests = [self.sampling_of(name) for name in names]
        known = torch.from_numpy(batch.num_tokens_no_spec[drafting]).long()
        golden = torch.from_numpy(batch.token_ids_cpu[drafting, known.numpy() - 1]).long()
        outputs = [
            self.requests[name].output_token_ids if request.adjusts else None
            for name, request in zip(names, requests, strict=True)
        ]

        def chooser(logits: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
            place, drafted = before.shape[1], before.tolist()
            seen = [None if own is None else [*own, *row] for own, row in zip(outputs, drafted, strict=True)]
            rows = Rows(requests, known + place, seen)
            return choose(adjusted(logits, rows), rows)

        anchors = known - 2
        return draft(model, self._step(drafting, anchors, length), golden, anchors, length, chooser)

    def _step(self, drafting: list[int], anchors: torch.Tensor, length: int) -> Step:
        """The rows of a drafted block, and where the draft blocks' caches lie for them."""
        chosen = torch.tensor(drafting)
        starts = torch.arange(0, (len(drafting) + 1) * length, length, dtype=torch.int32)
        metadata = {}
        for index, group in enumerate(self.kv_cache_config.kv_cache_groups):
            table = self.input_batch.block_table[index].get_device_tensor(self.input_batch.num_reqs)[chosen]
            for name in group.layer_names:
                metadata[name] = CacheMetadata(table, starts, group.kv_cache_spec.block_size)
        rows = torch.arange(len(drafting)).repeat_interleave(length)
        return Step(drafted_positions(anchors, length), rows, metadata)
