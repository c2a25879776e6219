"""How long the parts of a round take on its device, read when they are over, so that nothing waits for them."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

LAG = 2  # rounds between the end of one and reading its times: on the device it is over by then


@dataclass(frozen=True)
class RoundTime:
    """seconds: of the target's part, and of the drafting, 0 if there was none. rows: of the target; context: their
    tokens before them, summed; drafting: requests drafted for; is_decode: no row belongs to a prompt."""

    rows: int
    context: float
    drafting: int
    is_decode: bool
    target_seconds: float
    draft_seconds: float


@dataclass
class _Round:
    rows: int = 0
    context: float = 0.0
    drafting: int = 0
    is_decode: bool = False
    marks: list[Any] = field(default_factory=list)


class RoundTimes:
    """`begin` before the target's forward, `drafts` in front of the drafting, `end` behind it."""

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], Any] = _event if device.type == "cuda" else time.perf_counter
        self._seconds: Callable[[Any, Any], float] = _elapsed if device.type == "cuda" else lambda a, b: b - a
        self._now: _Round | None = None
        self._over: deque[_Round] = deque()

    def begin(self) -> None:
        self._now = _Round(marks=[self._mark()])

    def drafts(self, rows: int, context: float, is_decode: bool) -> None:
        if self._now is not None:
            self._now.rows, self._now.context, self._now.is_decode = rows, context, is_decode
            self._now.marks.append(self._mark())

    def end(self, drafting: int) -> None:
        if self._now is not None and len(self._now.marks) == 2:
            self._now.drafting = drafting
            self._now.marks.append(self._mark())
            self._over.append(self._now)
        self._now = None

    def finished(self) -> Iterator[RoundTime]:
        while len(self._over) > LAG:
            done = self._over.popleft()
            start, drafts, end = done.marks
            seconds = self._seconds(start, drafts), self._seconds(drafts, end) if done.drafting else 0.0
            yield RoundTime(done.rows, done.context, done.drafting, done.is_decode, *seconds)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed(start: Any, end: Any) -> float:
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
