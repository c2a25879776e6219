"""Which hardware this process computes on. The only place that asks."""

from enum import Enum
from functools import cache

import torch


class Target(Enum):
    """The hardware an implementation is for."""

    CPU = "cpu"
    NVIDIA = "nvidia"
    SM100 = "sm100"
    ASCEND = "ascend"

    @property
    def lineage(self) -> tuple["Target", ...]:
        """The targets whose implementations run here, best first: the only fallback there is."""
        return (Target.SM100, Target.NVIDIA) if self is Target.SM100 else (self,)

    @property
    def packs(self) -> bool:
        """Whether weights and caches are packed by default. A CPU decodes more slowly than it multiplies."""
        return self is not Target.CPU

    @property
    def interleaves(self) -> bool:
        """Whether kernels want the codes of packed weights interleaved (`packed_weights.py`)."""
        return self in (Target.NVIDIA, Target.SM100)


@cache
def current_target() -> Target:
    """The target of this process's default accelerator, or CPU where there is none.

    Raises:
        NotImplementedError: an accelerator that no implementation is written for.
    """
    if torch.cuda.is_available() and torch.version.cuda:
        return Target.SM100 if torch.cuda.get_device_capability() == (10, 0) else Target.NVIDIA
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or device.type == "cpu":
        return Target.CPU
    if device.type == "npu":
        return Target.ASCEND
    raise NotImplementedError(f"target: no kernels for {device.type}, only for {', '.join(t.value for t in Target)}")


def shared_memory_bytes() -> int:
    """What a program may use of an NVIDIA GPU's shared memory; without one, what the smallest of them have."""
    return {80: 163, 90: 227, 100: 227}.get(compute_capability(), 99) << 10


@cache
def compute_capability() -> int:
    """90 for SM90 and so on; 0 without an NVIDIA GPU."""
    if not (torch.cuda.is_available() and torch.version.cuda):
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
