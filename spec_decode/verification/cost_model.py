"""How long a round takes, as a function of its rows and their context: measured at the start, refreshed while serving.

Source: runtime specification, section 2.6, items 1, 6 and 7.
"""

import math
from dataclasses import dataclass, field
from statistics import median

import numpy as np

MEMORY = 1 / 16  # weight of a new measurement in a size's mean
FORGET = 1 - 1 / 256  # of the moments behind the cost of context, per measurement
STEP = 1.25  # sizes within this factor share a mean: neighbours differ by less than rounds do


@dataclass
class _Point:
    """Means over the rounds of about one size, and the moments of (context, seconds) within it."""

    size: float
    context: float
    seconds: float
    started: float | None = None  # seconds before any request, if that was measured
    is_live: bool = True
    variance: float = 0.0
    covariance: float = 0.0

    def add(self, size: float, context: float, seconds: float) -> None:
        # one round that was interrupted must not move a mean by more than its own height
        seconds = min(seconds, 2 * self.seconds)
        more, longer = context - self.context, seconds - self.seconds
        self.variance = FORGET * self.variance + more * more
        self.covariance = FORGET * self.covariance + more * longer
        self.size += MEMORY * (size - self.size)
        self.context += MEMORY * more
        self.seconds += MEMORY * longer


@dataclass
class Curve:
    """Seconds by size, linear between the sizes that were measured, and never falling; plus so much per context."""

    slope: float = 0.0  # seconds per token of context, the same at every size
    _points: dict[int, _Point] = field(default_factory=dict)
    _sizes: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _base: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def start(self, size: int, seconds: float) -> None:
        """A measurement from before any request, without context. Live ones replace it, and correct the others."""
        self._points[_bucket(size)] = _Point(size, 0.0, seconds, started=seconds, is_live=False)
        self._settle()

    def add(self, size: int, context: float, seconds: float) -> None:
        """A measurement of a round that is over."""
        point = self._points.get(_bucket(size))
        if point is None or not point.is_live:
            self._points[_bucket(size)] = _Point(size, context, seconds, started=point.started if point else None)
        else:
            point.add(size, context, seconds)
        self._settle()

    def seconds(self, sizes: np.ndarray, context: np.ndarray | float = 0.0) -> np.ndarray:
        """Of rounds of these sizes; 0 as long as nothing was measured."""
        if not len(self._sizes):
            return np.zeros(np.shape(sizes))
        base, largest = np.interp(sizes, self._sizes, self._base), self._sizes[-1]
        if len(self._sizes) > 1:
            rise = (self._base[-1] - self._base[0]) / (largest - self._sizes[0])
            base = base + rise * np.maximum(np.subtract(sizes, largest), 0)
        return base + self.slope * context

    def _settle(self) -> None:
        points = sorted(self._points.values(), key=lambda point: point.size)
        variance = sum(point.variance for point in points)
        self.slope = max(0.0, sum(point.covariance for point in points) / variance) if variance else 0.0
        self._sizes = np.array([point.size for point in points])
        ratios = [point.seconds / point.started for point in points if point.is_live and point.started]
        correction = median(ratios) if ratios else 1.0  # what rounds without requests leave out
        without_context = [
            max(point.seconds - self.slope * point.context, 0.0) if point.is_live else point.seconds * correction
            for point in points
        ]
        self._base = np.maximum.accumulate(without_context)


def _bucket(size: int) -> int:
    return round(math.log(max(size, 1), STEP))


@dataclass
class CostModel:
    """rows: of the target, by rows in a round, sampling included; drafts: of the draft network, by requests.

    measured: seconds of the rounds whose time was predicted, summed; error: of the differences, without their signs.
    captured: rows of the target's graphs, ascending: a round costs what its graph computes. Empty without graphs.
    """

    rows: Curve = field(default_factory=Curve)
    drafts: Curve = field(default_factory=Curve)
    error: float = 0.0
    measured: float = 0.0
    captured: tuple[int, ...] = ()

    def observe_rows(self, rows: int, context: float, seconds: float) -> None:
        computed = self._computed(np.array(rows))
        predicted = float(self.rows.seconds(computed, context))
        if predicted:
            self.error += abs(predicted - seconds)
            self.measured += seconds
        self.rows.add(int(computed), context, seconds)

    def round(self, rows: np.ndarray, context: np.ndarray, drafting: int) -> np.ndarray:
        """Seconds of rounds that compute so many rows with so much context, and then draft for so many requests."""
        seconds = self.rows.seconds(self._computed(rows), context)
        return seconds + self.drafts.seconds(np.array(drafting)) if drafting else seconds

    def _computed(self, rows: np.ndarray) -> np.ndarray:
        """The rows that a round of so many computes."""
        if not self.captured:
            return rows
        sizes = np.array(self.captured)
        larger = sizes[np.searchsorted(sizes, rows).clip(max=len(sizes) - 1)]
        return np.where(rows <= sizes[-1], larger, rows)
