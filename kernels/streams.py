"""A second stream of the device, for short work that would leave most of it idle by itself.

What is begun inside `beside` starts when everything before it on the current stream is done, and is done when `join`
has passed. Memory: results made beside are freed and reused there, which a later `beside` waits for like any work; so
they may be used on the current stream after `join`, and arguments must live until then. Devices without streams run
everything in order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

_running: set[torch.device] = set()  # devices with work begun beside and not joined


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run what follows on the second stream."""
    if device.type != "cuda":
        yield
        return
    side = _second_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    _running.add(device)
    with torch.cuda.stream(side):
        yield


def join(device: torch.device) -> None:
    """Let the current stream wait for what was begun beside it since the last time, if anything was.

    Without that condition a graph being captured would wait for work outside it, which CUDA refuses.
    """
    if device in _running:
        _running.remove(device)
        torch.cuda.current_stream(device).wait_stream(_second_stream(device))


def is_beside(device: torch.device) -> bool:
    """Whether the current stream is the second one."""
    return device.type == "cuda" and torch.cuda.current_stream(device) == _second_stream(device)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
