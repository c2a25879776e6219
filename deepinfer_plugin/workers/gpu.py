"""vLLM's GPU worker with our model runner."""

from typing import Any

from vllm.v1.worker import gpu_worker
from vllm.v1.worker.worker_base import CompilationTimes

from deepinfer_plugin import patches
from deepinfer_plugin.workers.speculation import SpeculationCalls


class GPUWorker(SpeculationCalls, gpu_worker.Worker):
    def _make_model_runner(self) -> Any:
        if not self.use_v2_model_runner:
            return super()._make_model_runner()
        from deepinfer_plugin.spec_decode.runner_v2 import DeepInferGPURunner

        patches.apply("worker")
        return DeepInferGPURunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times = super().compile_or_warm_up_model()
        if self.use_v2_model_runner:
            self.model_runner.start_serving()
        return times
