"""What is said of speculation while it runs: a line of the log, and numbers for the process that serves /metrics.

That process is another one than the worker's. The numbers lie in a small file that both map; a reader may see one round
in some of them and the next in others.
"""

import atexit
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")
LINE_EVERY = 10.0  # seconds, while drafts are verified
TOTALS = ("rounds", "emitted", "engine_rounds", "budget", "cost_error")  # one number each
BY_PLACE = ("drafted", "scheduled", "verified", "accepted", "calibration_error")  # one for each place

Numbers = Mapping[str, np.ndarray]  # float64, [] or [num_places]


def metrics_file(vllm_config: VllmConfig, engine_index: int) -> Path:
    """The file of an engine, the same in all its processes on this host."""
    folder = Path(tempfile.gettempdir()) / f"deepinfer-{os.getuid()}"
    return folder / f"{vllm_config.instance_id}-{engine_index}"


def reporter_of(vllm_config: VllmConfig, num_places: int) -> "Reporter | None":
    """On the rank that speaks for the engine."""
    rank = vllm_config.parallel_config.data_parallel_index
    return Reporter(metrics_file(vllm_config, rank), num_places) if get_tp_group().is_first_rank else None


class Reporter:
    """Of one engine; its file lives as long as the process."""

    def __init__(self, path: Path, num_places: int) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        size = len(TOTALS) + len(BY_PLACE) * num_places
        self._shared = np.memmap(path, np.float64, "w+", shape=(size,))
        atexit.register(path.unlink, missing_ok=True)
        self._next_line = time.monotonic() + LINE_EVERY

    def report(self, numbers: Numbers) -> None:
        """After a round that verified drafts."""
        self._shared[:] = np.concatenate([np.atleast_1d(numbers[name]) for name in (*TOTALS, *BY_PLACE)])
        if (now := time.monotonic()) >= self._next_line:
            self._next_line = now + LINE_EVERY
            logger.info(line(numbers))


def read(path: Path) -> Numbers | None:
    """What a reporter has written last; None if there is none."""
    try:
        numbers = np.fromfile(path, np.float64)
    except FileNotFoundError:
        return None
    totals, by_place = numbers[: len(TOTALS)], numbers[len(TOTALS) :].reshape(len(BY_PLACE), -1)
    return dict(zip(TOTALS, totals, strict=True)) | dict(zip(BY_PLACE, by_place, strict=True))


def line(numbers: Numbers) -> str:
    """For people."""

    def places(name: str, spec: str = ".0f") -> str:
        return "/".join(f"{value:{spec}}" for value in numbers[name])

    per_request = numbers["emitted"] / max(numbers["rounds"], 1)
    per_round = numbers["budget"] / max(numbers["engine_rounds"], 1)
    return (
        f"DSpark by place: drafted {places('drafted')}, scheduled {places('scheduled')}, verified "
        f"{places('verified')}, accepted {places('accepted')}; {per_request:.2f} tokens a verified request, "
        f"{per_round:.1f} drafts a round, calibration error {places('calibration_error', '.2f')}, "
        f"round time error {numbers['cost_error']:.0%}"
    )
