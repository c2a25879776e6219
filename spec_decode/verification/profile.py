"""Measuring rounds before there is any request."""

import time
from collections.abc import Callable
from statistics import median

from tqdm import tqdm

from deepinfer_plugin.spec_decode.verification.cost_model import Curve

REPEATS = 3  # of which the median counts, after one round to warm up
PATIENCE = 5.0  # seconds, after which larger sizes are left to be learnt while serving


def measure(curve: Curve, run: Callable[[int], object], largest: int, what: str) -> None:
    """Time `run(size)` for sizes 1, 2, 4, ... and `largest`."""
    sizes = [1 << n for n in range(largest.bit_length()) if 1 << n < largest] + [largest]
    start = time.perf_counter()
    for size in tqdm(sizes, desc=f"Timing {what}", leave=False):
        if time.perf_counter() - start > PATIENCE:
            break
        run(size)
        curve.start(size, median(_seconds(run, size) for _ in range(REPEATS)))


def _seconds(run: Callable[[int], object], size: int) -> float:
    start = time.perf_counter()
    run(size)
    return time.perf_counter() - start
