"""What every test shares: the device to compute on, and reproducible random numbers."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny products: a second thread only waits
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # before vLLM is imported: one process, seconds to start

from deepinfer_plugin.kernels.target import Target, current_target


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        metavar="MODULE",
        help="test this implementation (triton_nvidia) of every op that has it, without its device in an interpreter",
    )


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


@pytest.fixture(scope="session")
def varied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with random norm weights and sinks (else all 1 and all 0), so that a swap shows."""
    from deepinfer_plugin.model_executor.models.tiny import write_tiny

    folder = tmp_path_factory.mktemp("varied-v41")
    write_tiny(folder)
    generator = torch.Generator().manual_seed(1)
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensors[name] = (1 + 0.2 * noise).to(tensor.dtype)
            elif name.endswith("attn_sink"):
                tensors[name] = noise.to(tensor.dtype)
        save_file(tensors, shard, metadata={"format": "pt"})
    return folder
