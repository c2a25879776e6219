"""DSpark behind vLLM's V1 runner, which is the one for CPUs: sampling, verification and drafting of a step."""

import time
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.model_executor.model_loader import get_model
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from deepinfer_plugin.kernels.noise import DRAFT
from deepinfer_plugin.model_executor.caches.metadata import CacheMetadata, Step
from deepinfer_plugin.model_executor.config import DeepInferConfig
from deepinfer_plugin.spec_decode.dspark.draft_model import DSparkV41DraftModel
from deepinfer_plugin.spec_decode.dspark.proposer import Drafts, draft, drafted_positions
from deepinfer_plugin.spec_decode.report import reporter_of
from deepinfer_plugin.spec_decode.sampling.choose import Rows, adjusted, choose
from deepinfer_plugin.spec_decode.sampling.coupled import accepted, as_matrix, without_placeholders
from deepinfer_plugin.spec_decode.sampling.logprobs import gather_logprobs
from deepinfer_plugin.spec_decode.sampling.ratio import Proposal, emit, probabilities
from deepinfer_plugin.spec_decode.sampling.request import RequestSampling, Seeds
from deepinfer_plugin.spec_decode.verification.profile import measure
from deepinfer_plugin.spec_decode.verification.schedule import Drafted, Load, Schedule
from deepinfer_plugin.spec_decode.verification.state import Speculation

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
        self.speculation: Speculation | None = None
        self.is_coupled = True
        if isinstance(getattr(self, "drafter", None), DSparkProposer):
            ours = DeepInferConfig.from_vllm(vllm_config)
            self.speculation = Speculation(self.num_spec_tokens, ours.scheduled_verification)
            self.speculation.reporter = reporter_of(vllm_config, self.num_spec_tokens)
            self.is_coupled = ours.verification == "coupled"
        self.proposals: dict[str, Proposal] = {}  # for the ratio test: what was drafted last, from which probabilities
        self.round_start, self.execute_rows = 0.0, 0
        self.seeds = Seeds(self.model_config.seed)
        self.asked: dict[str, RequestSampling] = {}

    def _update_states(self, scheduler_output: Any) -> Any:
        for name in scheduler_output.finished_req_ids:
            self.asked.pop(name, None)
            self.proposals.pop(name, None)
        result = super()._update_states(scheduler_output)
        self.input_batch.generators.clear()  # the noise is ours; vLLM would wind back generators that CPUs cannot
        return result

    def start_serving(self) -> None:
        """Called when vLLM has warmed up: measure what rounds of the target and of the draft network cost."""
        if self.speculation is None or not self.speculation.is_scheduled:
            return
        most, length, cost = self.max_num_reqs, self.num_spec_tokens, self.speculation.cost

        def rows(size: int) -> None:
            hidden_states = self._dummy_run(size)[0]
            self.model.compute_logits(hidden_states[:size])

        def drafts(size: int) -> None:
            anchors = torch.zeros(size, dtype=torch.int64)
            step = self._step(torch.zeros(size, dtype=torch.int64), anchors, length)
            draft(self.drafter.model, step, anchors, anchors, length, lambda logits, before: logits.argmax(1))

        with torch.inference_mode():
            measure(cost.rows, rows, min(most * (1 + length), self.max_num_tokens), "rounds of the target")
            measure(cost.drafts, drafts, most, "drafts")

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.round_start, self.execute_rows = time.perf_counter(), scheduler_output.total_num_scheduled_tokens
        return super().execute_model(scheduler_output, *args, **kwargs)

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
            counts, flat = spec_decode_metadata.num_draft_tokens, spec_decode_metadata.draft_token_ids.tolist()
            drafts, kept = without_placeholders(flat, counts)
            logits = logits if len(kept) == len(logits) else logits[kept]
        rows, first_rows = self._rows(drafts)
        raw = logits.float()
        changed = self._processed(adjusted(raw, rows), drafts, first_rows)
        if self.is_coupled:
            tokens = accepted(choose(changed, rows).tolist(), drafts)
        else:
            tokens = [
                emit(
                    changed[first : first + len(own) + 1],
                    self.sampling_of(name),
                    int(known),
                    own,
                    self.proposals.get(name),
                )
                for name, first, own, known in zip(
                    self.input_batch.req_ids, first_rows, drafts, rows.positions[first_rows], strict=True
                )
            ]
        self._learn(tokens, drafts, rows)
        emitted = as_matrix(tokens, 1 + max(map(len, drafts)))
        metadata, requests = self.input_batch.sampling_metadata, list(rows.requests)
        logprobs = gather_logprobs(self.sampler, metadata, raw, changed, requests, emitted, first_rows)
        return SamplerOutput(emitted, logprobs)

    def _learn(self, emitted: list[list[int]], drafts: list[list[int]], rows: Rows) -> None:
        """What became of the drafts, and how long a round without prefills took."""
        if self.speculation is None:
            return
        drafted = [n for n, own in enumerate(drafts) if own]
        if drafted:
            logits = np.stack([self.speculation.logits_of(self.input_batch.req_ids[n]) for n in drafted])
            verified, lengths = (np.array([len(x[n]) for n in drafted]) for x in (drafts, emitted))
            self.speculation.observe(logits, verified, lengths)
        num_rows = len(rows.requests)
        if self.execute_rows == num_rows:
            seconds = time.perf_counter() - self.round_start
            self.speculation.cost.observe_rows(num_rows, float(rows.positions.sum()), seconds)

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
        if self.speculation is None:
            return super()._input_fits_in_drafter(common_attn_metadata)
        return common_attn_metadata is not None  # a request near its end gets fewer drafts, by itself

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: Any, *args: Any
    ) -> list[list[int]] | torch.Tensor:
        """Drafts for requests that have just sampled a token, as many as are to be verified; none for the others."""
        if self.speculation is None:
            return super().propose_draft_token_ids(scheduler_output, sampled_token_ids, *args)
        known = self.input_batch.num_tokens_no_spec
        room = self.max_model_len - 1 - known  # vLLM cuts what `max_tokens` leaves unused
        drafting = [n for n, new in enumerate(sampled_token_ids) if new and room[n] > 0 and self._may_draft(n)]
        proposed: list[list[int]] = [[] for _ in sampled_token_ids]
        load = self._load(sampled_token_ids, scheduler_output)
        if drafting and self._wants_drafts(self.speculation.schedule, load):
            start = time.perf_counter()
            drafts, probabilities = self._draft(drafting)
            self.speculation.cost.drafts.add(len(drafting), 0.0, time.perf_counter() - start)
            names = [self.input_batch.req_ids[n] for n in drafting]
            within = np.minimum(room[drafting], self.num_spec_tokens)
            drafted = Drafted(names, drafts.confidence.double().numpy(), within)
            admitted = self.speculation.admit(drafted, load)
            for n, tokens, count in zip(drafting, drafts.tokens.tolist(), admitted, strict=True):
                proposed[n] = tokens[:count]
            for n, name in enumerate([] if self.is_coupled else names):
                place = drafting[n]
                self.proposals[name] = Proposal(int(known[place]), drafts.tokens[n].tolist(), probabilities[:, n])
        return proposed

    @staticmethod
    def _wants_drafts(schedule: Schedule, load: Load) -> bool:
        """The same on all ranks, which draft together; each has measured other times."""
        wanted, group = schedule.wants_drafts(load), get_tp_group()
        return wanted if group.world_size == 1 else group.broadcast_object(wanted, src=0)

    def _load(self, sampled: list[list[int]], scheduler_output: Any) -> Load:
        """The next round, as far as the requests of this one go."""
        known, batch = self.input_batch.num_tokens_no_spec, self.input_batch
        sampling = [n for n, new in enumerate(sampled) if new]
        waiting = [n for n, new in enumerate(sampled) if not new]
        done = [scheduler_output.num_scheduled_tokens.get(batch.req_ids[n], 0) for n in waiting]
        left = int((batch.num_prompt_tokens[waiting] - batch.num_computed_tokens_cpu[waiting] - done).clip(min=0).sum())
        prefill = min(left, self.max_num_tokens - len(sampling))
        return Load(len(sampling) + prefill, len(sampling), float(known[sampling].sum()))

    def _may_draft(self, index: int) -> bool:
        return self.requests[self.input_batch.req_ids[index]].sampling_params.thinking_token_budget is None

    def _draft(self, drafting: list[int]) -> tuple[Drafts, torch.Tensor]:
        """Drafts for the requests at these places of the batch; and for the ratio test the probabilities that they were
        drawn from, fp32 [num_places, num_requests, vocab_size].
        """
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
            changed = adjusted(logits, rows)
            if self.is_coupled:
                return choose(changed, rows)
            drawn_from.append(torch.stack([probabilities(row, r) for row, r in zip(changed, requests, strict=True)]))
            return choose(changed, rows, DRAFT)

        anchors, drawn_from = known - 2, list[torch.Tensor]()
        drafts = draft(model, self._step(torch.tensor(drafting), anchors, length), golden, anchors, length, chooser)
        return drafts, torch.stack(drawn_from) if drawn_from else torch.empty(0)

    def _step(self, drafting: torch.Tensor, anchors: torch.Tensor, length: int) -> Step:
        """The rows of a drafted block, and where the draft blocks' caches lie for them."""
        starts = torch.arange(0, (len(drafting) + 1) * length, length, dtype=torch.int32)
        metadata = {}
        for index, group in enumerate(self.kv_cache_config.kv_cache_groups):
            table = self.input_batch.block_table[index].get_device_tensor(self.max_num_reqs)[drafting]
            for name in group.layer_names:
                metadata[name] = CacheMetadata(table, starts, group.kv_cache_spec.block_size)
        rows = torch.arange(len(drafting)).repeat_interleave(length)
        return Step(drafted_positions(anchors, length), rows, metadata)
