"""What every test shares: the device to compute on, and reproducible random numbers."""

import pytest
import torch

from deepinfer_plugin.kernels.target import Target, current_target


@pytest.fixture
def device() -> str:
    return {Target.CPU: "cpu", Target.ASCEND: "npu"}.get(current_target(), "cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
