"""vLLM's V2 runner, which is the one for GPUs, with coupled sampling, and with DSpark's drafts."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from deepinfer_plugin.spec_decode.dspark.speculator_v2 import DSparkSpeculator
from deepinfer_plugin.spec_decode.sampling.coupled_v2 import CoupledSampler, CoupledVerification


class DeepInferGPURunner(GPUModelRunner):
    sampler: Any
    rejection_sampler: Any

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        if isinstance(self.speculator, DSparkSpeculator):
            self.use_aux_hidden_state_outputs = False  # our target hands its features over by itself

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
