"""DSpark behind vLLM's V2 runner: a round of drafting is one CUDA graph, its inputs and results stay on the device."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from deepinfer_plugin.model_executor.caches.metadata import CacheMetadata, Step
from deepinfer_plugin.model_executor.config import DeepInferConfig
from deepinfer_plugin.spec_decode.dspark.draft_model import DSparkV41DraftModel
from deepinfer_plugin.spec_decode.dspark.proposer import Chooser, Drafts, draft, drafted_positions
from deepinfer_plugin.spec_decode.sampling.choose import Limits, choose_tokens
from deepinfer_plugin.spec_decode.sampling.coupled_v2 import CoupledSampler, DraftRows
from deepinfer_plugin.spec_decode.verification.calibration import LARGEST
from deepinfer_plugin.spec_decode.verification.manager_v2 import ScheduledVerification
from deepinfer_plugin.spec_decode.verification.round_times import RoundTimes
from deepinfer_plugin.spec_decode.verification.state import Speculation
from deepinfer_plugin.spec_decode.verification.verified import Verified

logger = init_logger(f"vllm.{__name__}")


class DSparkSpeculator(DraftModelSpeculator):
    """What vLLM's runner calls at the end of a step.

    Buffers, for the requests of a batch: `golden`, each one's newest token; `anchors`, the position of the token before
    it, -1 for rows that pad a graph; `limits`; and as results `draft_tokens` and `confidence`, logits.
    """

    sampler: CoupledSampler  # set by the runner
    model: DSparkV41DraftModel
    manager: ScheduledVerification | None = None  # set by the runner, if the number of verified drafts is scheduled

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.num_query_per_req = self.num_speculative_steps
        ours = DeepInferConfig.from_vllm(vllm_config)
        self.speculation = Speculation(self.num_speculative_steps, ours.scheduled_verification)
        self.times = RoundTimes(device)
        self.use_acceptance_estimator = False  # the checkpoint has a confidence head
        most = self.max_num_reqs
        self.golden = torch.zeros(most, dtype=torch.int64, device=device)
        self.anchors = torch.full((most,), -1, dtype=torch.int64, device=device)
        self.limits = Limits(
            torch.zeros(most, dtype=torch.float32, device=device),
            torch.zeros(most, dtype=torch.int64, device=device),
            torch.zeros(most, dtype=torch.int32, device=device),
            torch.ones(most, dtype=torch.float32, device=device),
            torch.zeros(most, dtype=torch.float32, device=device),
        )
        self.confidence = torch.zeros(most, self.num_speculative_steps, dtype=torch.float32, device=device)
        self._slot_confidence = torch.full_like(self.confidence, torch.nan)  # of drafts under way, by request slot
        self._verified: Verified | None = None
        self._lines, self._lines_on_device = np.zeros(0), torch.zeros(0)
        self.block_tables: BlockTables | None = None

    def load_model(self, target_model: nn.Module) -> None:
        self.model = self.load_draft_model(target_model, set())
        # the target's forward writes the draft blocks' caches, so the runner's metadata must cover them
        self.draft_attn_layer_names: set[str] = set()

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        model: DSparkV41DraftModel = get_model(
            vllm_config=self.vllm_config, model_config=self.speculative_config.draft_model_config
        )
        model.follow(target_model)
        return model

    def set_attn(self, model_state: Any, kv_cache_config: KVCacheConfig, block_tables: BlockTables, *_: Any) -> None:
        self.kv_cache_config, self.block_tables = kv_cache_config, block_tables

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        is_full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if is_full else CUDAGraphMode.NONE
        self.graphs, self.limited_graphs = (
            CudaGraphManager(self.vllm_config, self.device, mode, self.num_speculative_steps) for _ in range(2)
        )

    def capture(self) -> None:
        self.anchors.fill_(-1)
        for graphs, limits, what in (
            (self.graphs, self._without_limits(self.limits), "drafts"),
            (self.limited_graphs, self.limits, "drafts under limits"),
        ):
            graphs.capture(self._captured(limits), f"Capturing CUDA graphs of {what}")

    def _captured(self, limits: Limits) -> Callable[[BatchExecutionDescriptor, bool], Callable[[CUDAGraphMode], None]]:
        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            def forward(mode: CUDAGraphMode) -> None:
                assert desc.num_reqs is not None
                self._draft(desc.num_reqs, self._coupled(desc.num_reqs, limits))

            return forward

        return create

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """int64 [num_reqs, num_speculative_steps]: the drafts of every request of the batch.

        Those of requests that are not through with their prompt are noise, and vLLM does not use them.
        """
        count = input_batch.num_reqs
        if self.block_tables is None:
            self._reserve(count)
        elif num_speculative_tokens != 0:
            if not dummy_run:
                context = float(input_batch.num_computed_tokens_np.mean()) * input_batch.num_tokens
                self.times.drafts(input_batch.num_tokens, context, not input_batch.has_prefill)
            drafts = dummy_run or self.manager is None or self.manager.wants_drafts()
            if drafts:
                self._prepare(input_batch, num_rejected, last_sampled)
                self._run(input_batch)
                self._slot_confidence[input_batch.idx_mapping] = self.confidence[:count]
            else:
                self.confidence[:count] = self._slot_confidence[input_batch.idx_mapping]
            self._publish(count)
            self.times.end(count if drafts else 0)
        return self.draft_tokens[:count]

    def _publish(self, count: int) -> None:
        """The confidences of a batch, calibrated, where vLLM looks for them."""
        if self.manager is not None:
            slope, offset = self._calibration()
            logits = self.confidence[:count].nan_to_num(-LARGEST) * slope + offset
            self.draft_token_confidence_probs[:count] = logits.sigmoid()

    def _calibration(self) -> torch.Tensor:
        """fp32 [2, num_places]: slopes and offsets, copied to the device when they have changed."""
        lines = self.speculation.calibration.lines
        if not np.array_equal(lines, self._lines):
            self._lines = lines.copy()
            self._lines_on_device = async_tensor_h2d(lines.T.astype(np.float32), device=self.device)
        return self._lines_on_device

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Learn from the round before, and take this one's results along; the copy is over when the next one comes."""
        if self._verified is not None:
            self._learn(self._verified)
        self._verified = Verified.fetch(self._slot_confidence[idx_mapping], num_sampled, num_rejected)
        for done in self.times.finished():
            if self.manager is not None:
                self.manager.observe(done)

    def start_serving(self) -> None:
        """Count from now on: the rounds before were vLLM's warm-up."""
        self._verified, self.times = None, RoundTimes(self.device)
        self.speculation.forget()
        if self.manager is not None:
            self.manager.is_serving = True

    def _learn(self, round_: Verified) -> None:
        logits, emitted, rows = round_.values()
        drafted = (rows > 1) & (emitted > 0)
        if drafted.any():
            self.speculation.counts.observe_drafts(rows[drafted] - 1)
            self.speculation.observe(logits[drafted], rows[drafted] - 1, emitted[drafted])

    def _reserve(self, count: int) -> None:
        """The largest tensors of a round, for vLLM's measurement of memory, which comes before there are caches."""
        rows = count * self.num_speculative_steps
        hidden = torch.zeros(rows, self.draft_model_config.get_hidden_size(), dtype=self.dtype, device=self.device)
        base = self.model.base_logits(hidden)
        self.model.markov(base[:count], hidden[:count], self.golden[:count])

    def _prepare(self, input_batch: InputBatch, num_rejected: torch.Tensor, last_sampled: torch.Tensor) -> None:
        count, slots = input_batch.num_reqs, input_batch.idx_mapping
        self.golden[:count] = last_sampled[slots, 0]
        last_rows = input_batch.query_start_loc[1 : count + 1] - 1
        self.anchors.fill_(-1)
        self.anchors[:count] = input_batch.positions[last_rows] - num_rejected
        states, own = self.sampler.sampling_states, self.limits
        own.temperature[:count] = states.temperature.gpu[slots]
        own.seeds[:count] = states.seeds.gpu[slots]
        if self.sampler.has_limits(input_batch.idx_mapping_np):
            for ours, vllms in ((own.top_k, states.top_k), (own.top_p, states.top_p), (own.min_p, states.min_p)):
                assert ours is not None
                ours[:count] = vllms.gpu[slots]

    @staticmethod
    def _without_limits(limits: Limits) -> Limits:
        return Limits(limits.temperature, limits.seeds, None, None, None)

    def _run(self, input_batch: InputBatch) -> None:
        count, length = input_batch.num_reqs, self.num_speculative_steps
        has_limits = self.sampler.has_limits(input_batch.idx_mapping_np)
        limits = self.limits if has_limits else self._without_limits(self.limits)
        if self.sampler.adjusts[input_batch.idx_mapping_np].any():
            self._draft(count, self._adjusting(input_batch, limits))
            return
        graphs = self.limited_graphs if has_limits else self.graphs
        desc = graphs.dispatch(count, count * length, length, 0)
        if desc.cg_mode == CUDAGraphMode.FULL:
            graphs.run_fullgraph(desc)
        else:
            self._draft(count, self._coupled(count, limits))

    def _draft(self, count: int, choose: Chooser) -> None:
        anchors, length = self.anchors[:count], self.num_speculative_steps
        drafts: Drafts = draft(self.model, self._step(count), self.golden[:count], anchors, length, choose)
        self.draft_tokens[:count] = drafts.tokens
        self.confidence[:count] = drafts.confidence

    def _coupled(self, count: int, limits: Limits) -> Chooser:
        """Each place's choice, by the target's noise and under its limits."""
        own = Limits(*(None if x is None else x[:count] for x in vars(limits).values()))
        known = self.anchors[:count] + 2

        def choose(logits: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
            return choose_tokens(logits, own, known + before.shape[1])

        return choose

    def _adjusting(self, input_batch: InputBatch, limits: Limits) -> Chooser:
        """The same behind penalties, biases and exclusions, for a batch in which a request has any."""
        count, length = input_batch.num_reqs, self.num_speculative_steps
        coupled, anchors = self._coupled(count, limits), self.anchors[:count]
        inputs = torch.zeros(count, length, dtype=input_batch.input_ids.dtype, device=self.device)
        inputs[:, 0] = self.golden[:count]
        rows = DraftRows(
            input_batch.idx_mapping.repeat_interleave(length),
            input_batch.idx_mapping_np,
            inputs.view(-1),
            drafted_positions(anchors, length),
            length,
        )

        def choose(logits: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
            place = before.shape[1]
            if place:
                inputs[:, place] = before[:, -1]
            return coupled(self.sampler.adjust_drafts(logits, place, rows), before)

        return choose

    def _step(self, count: int) -> Step:
        """The rows of a drafted block, and the block tables of the batch."""
        assert self.block_tables is not None
        length, anchors = self.num_speculative_steps, self.anchors[:count]
        starts = torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=self.device)
        metadata = {}
        for group, table in zip(
            self.kv_cache_config.kv_cache_groups, self.block_tables.input_block_tables, strict=True
        ):
            for name in group.layer_names:
                metadata[name] = CacheMetadata(table[:count], starts, group.kv_cache_spec.block_size)
        requests = torch.arange(count, device=self.device).repeat_interleave(length)
        positions = drafted_positions(anchors, length).masked_fill((anchors < 0).repeat_interleave(length), -1)
        return Step(positions, requests, metadata)
