"""vLLM's GPU worker with our model runner."""

from typing import Any

from vllm.v1.worker import gpu_worker

from deepinfer_plugin import patches


class GPUWorker(gpu_worker.Worker):
    def _make_model_runner(self) -> Any:
        if not self.use_v2_model_runner:
            return super()._make_model_runner()
        from deepinfer_plugin.spec_decode.runner_v2 import DeepInferGPURunner

        patches.apply("worker")
        return DeepInferGPURunner(self.vllm_config, self.device)
