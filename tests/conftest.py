"""What every test shares: the device to compute on, and reproducible random numbers."""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny products: a second thread only waits
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # before vLLM is imported: one process, seconds to start

from deepinfer_plugin.kernels.target import Target, current_target


@pytest.fixture
def device() -> str:
    return {Target.CPU: "cpu", Target.ASCEND: "npu"}.get(current_target(), "cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny V4.1 checkpoint with random weights, seed 0."""
    from deepinfer_plugin.model_executor.models.tiny import write_tiny

    folder = tmp_path_factory.mktemp("tiny-v41")
    write_tiny(folder)
    return folder
