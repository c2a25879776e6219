"""How many drafts a round verifies behind vLLM's V2 runner: vLLM's mechanism on the device, our decisions.

The number is decided on the host, by confidences one generation old; which drafts these are on the device, by the
current ones (`kernels/verify_budget`; runtime specification, sections 2.2 and 2.6).
"""

import copy
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import torch
from vllm.distributed import get_tp_group
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
from vllm.v1.worker.gpu.states import RequestState

from deepinfer_plugin.kernels.verify_budget import verify_budget
from deepinfer_plugin.spec_decode.verification.cost_model import CostModel
from deepinfer_plugin.spec_decode.verification.round_times import RoundTime
from deepinfer_plugin.spec_decode.verification.schedule import AnyNumber, Load
from deepinfer_plugin.spec_decode.verification.state import Speculation

SHARE_EVERY = 64  # rounds, after which what was measured decides, the same on every rank


class ScheduledVerification(AdaptiveVerificationManager):
    def __init__(
        self,
        speculation: Speculation,
        req_states: RequestState,
        query_start_loc: torch.Tensor,
        num_bonus_tokens: int,
        max_total_logits: int,
    ) -> None:
        super().__init__(req_states, query_start_loc, num_bonus_tokens, max_total_logits)
        self.speculation = speculation
        self.measured = CostModel()  # by this rank
        self.load: Load | None = None  # of the last round that could verify drafts
        self.has_drafts = True  # made at the end of the round before
        self.is_serving = False  # before, rounds of vLLM's warm-up compile kernels
        self._rounds = 0

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        self.measured.captured = tuple(capture_sizes)
        return super().batches_to_profile(capture_sizes)

    def set_initial_cost_curves(self, samples: list[StepTimingSample]) -> None:
        """What vLLM measured before there were requests: the median of each size."""
        rows, drafts = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
        for sample in samples:
            rows[sample.num_target_tokens].append(sample.forward_ms)
            if sample.full_cudagraph:  # elsewhere launches leave gaps between the drafter's kernels
                drafts[sample.num_reqs].append(sample.drafter_ms)
        for curve, sizes in ((self.measured.rows, rows), (self.measured.drafts, drafts)):
            for size, times in sorted(sizes.items()):
                curve.start(size, float(np.median(times)) / 1e3)
        self._share()

    def observe(self, done: RoundTime) -> None:
        """A round that is over."""
        if not self.is_serving:
            return
        if done.is_decode:
            self.measured.observe_rows(done.rows, done.context, done.target_seconds)
            if done.drafting:
                self.measured.drafts.add(done.drafting, 0.0, done.draft_seconds)
        self._rounds += 1
        if self._rounds % SHARE_EVERY == 0:
            self._share()

    def _share(self) -> None:
        group, shared = get_tp_group(), copy.deepcopy(self.measured)
        if group.world_size > 1:
            shared = group.broadcast_object(shared, src=0)
        vars(self.speculation.cost).update(vars(shared))

    def wants_drafts(self) -> bool:
        """Whether to draft at the end of this round, expecting the next to be like the last."""
        self.has_drafts = self.load is None or self.speculation.schedule.wants_drafts(self.load)
        return self.has_drafts

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """The rows of the round that is being scheduled, with as many drafts as are to be verified."""
        names = list(num_tokens_per_req)
        drafts = np.array([len(draft_tokens.get(name, ())) for name in names])
        own = np.array(list(num_tokens_per_req.values())) - drafts
        slots = np.array([self.req_states.req_id_to_index[name] for name in names])
        computed = self.req_states.num_computed_tokens_np[slots]
        samples = computed + own >= self.req_states.prefill_len.np[slots]
        load = self.load = Load(int(own.sum()), int(samples.sum()), float(computed[samples].sum()))
        available = np.arange(self.num_speculative_steps) < drafts[:, None]
        survival = self._stale_confidences[self._stale_idx].np[slots].astype(np.float64).cumprod(1)[available]
        most = max(0, self._max_total_logits - len(names) * self.num_bonus_tokens)
        budget = min(self.speculation.schedule.budget(survival, load), most) if self.has_drafts else 0
        counts = (dict(zip(names, numbers.tolist(), strict=True)) for numbers in (drafts, own))
        self._batch_budget = (*counts, budget)
        return load.rows + budget

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: InputBatch) -> None:
        if isinstance(self.speculation.schedule, AnyNumber):  # not only how many is to be random, also which
            confidence_probs = torch.rand_like(confidence_probs)
        super().record_confidences(confidence_probs, input_batch)


def assign(
    confidence_probs: torch.Tensor,
    idx_mapping: torch.Tensor,
    capacities: torch.Tensor,
    draft_budget: int,
    num_steps: int,
) -> None:
    """Split `draft_budget` among a batch's requests: `capacities` holds their drafts, then how many are admitted."""
    survival = confidence_probs[idx_mapping].cumprod(1)
    is_draft = torch.arange(num_steps, device=survival.device) < capacities[:, None]
    capacities.copy_(verify_budget(survival.masked_fill(~is_draft, -torch.inf), draft_budget))
