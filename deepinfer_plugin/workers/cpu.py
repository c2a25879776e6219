"""vLLM's CPU worker with our model runner."""

from vllm.v1.worker import cpu_worker
from vllm.v1.worker.worker_base import CompilationTimes

from deepinfer_plugin import patches
from deepinfer_plugin.spec_decode.runner_v1 import DeepInferCPURunner
from deepinfer_plugin.workers.speculation import SpeculationCalls


class CPUWorker(SpeculationCalls, cpu_worker.CPUWorker):
    """The runner's class is looked up in vLLM's module when the device is initialised, and only then is it ours."""

    def init_device(self) -> None:
        if self.use_v2_model_runner:
            self._init_device_v2()
            return
        vllms, cpu_worker.CPUModelRunner = cpu_worker.CPUModelRunner, DeepInferCPURunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = vllms

    def _init_device_v2(self) -> None:
        """vLLM's V2 runner on a CPU, where there is a Triton for it."""
        from vllm.v1.worker.cpu import model_runner

        from deepinfer_plugin.spec_decode.runner_v2 import DeepInferGPURunner

        vllms = model_runner.CPUModelRunner
        patches.apply("worker")
        model_runner.CPUModelRunner = type("DeepInferCPURunnerV2", (DeepInferGPURunner, vllms), {})
        try:
            super().init_device()
        finally:
            model_runner.CPUModelRunner = vllms

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times = super().compile_or_warm_up_model()
        self.model_runner.start_serving()
        return times
