"""vLLM's V2 runner, which is the one for GPUs, with coupled sampling, and with DSpark's drafts."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from deepinfer_plugin.spec_decode.dspark.speculator_v2 import DSparkSpeculator
from deepinfer_plugin.spec_decode.report import reporter_of
from deepinfer_plugin.spec_decode.sampling.coupled_v2 import CoupledSampler, CoupledVerification
from deepinfer_plugin.spec_decode.verification.manager_v2 import ScheduledVerification
from deepinfer_plugin.spec_decode.verification.state import Speculation


class DeepInferGPURunner(GPUModelRunner):
    sampler: Any
    rejection_sampler: Any
    speculation: Speculation | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        if isinstance(self.speculator, DSparkSpeculator):
            self.use_aux_hidden_state_outputs = False  # our target hands its features over by itself
            self.speculation = self.speculator.speculation
            self.speculation.reporter = reporter_of(vllm_config, self.num_speculative_steps)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.sampler is None:  # ranks that do not sample
            return
        self.sampler = CoupledSampler(self.sampler)
        if isinstance(self.speculator, DSparkSpeculator):
            self.speculator.sampler = self.sampler
            if self.speculative_config.rejection_sample_method == "synthetic":  # vLLM's, for measurements
                self.rejection_sampler.sampler = self.sampler
            else:
                self.rejection_sampler = CoupledVerification(self.sampler, self.speculative_config, self.device)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if isinstance(self.speculator, DSparkSpeculator) and self.speculator.speculation.is_scheduled:
            self.adaptive_verification = self.speculator.manager = ScheduledVerification(
                self.speculator.speculation,
                self.req_states,
                self.input_buffers.query_start_loc,
                self.model_state.num_new_sampled_tokens_per_step,
                get_max_chunk_logits(self.vocab_size),
            )
            self.rejection_sampler.enable_adaptive_verification = True  # requests' rows are known to the device alone

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.speculator, DSparkSpeculator):
            self.speculator.times.begin()
        return super().execute_model(scheduler_output, *args, **kwargs)

    def start_serving(self) -> None:
        """Called when vLLM has warmed up."""
        if isinstance(self.speculator, DSparkSpeculator):
            self.speculator.start_serving()
