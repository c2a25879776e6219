"""What is known of drafts between the round that makes them and the round that verifies them."""

import numpy as np

from deepinfer_plugin.spec_decode.metrics import SpeculationCounts
from deepinfer_plugin.spec_decode.report import BY_PLACE, TOTALS, Numbers, Reporter
from deepinfer_plugin.spec_decode.verification.calibration import Calibration
from deepinfer_plugin.spec_decode.verification.cost_model import CostModel
from deepinfer_plugin.spec_decode.verification.schedule import AnyNumber, Drafted, Everything, Load, Schedule, WhatPays


class Speculation:
    """One engine's: who decides, what it has learnt, and the confidences of the drafts under way.

    reporter: of the rank that speaks for the engine, None on the others.
    """

    reporter: Reporter | None = None

    def __init__(self, num_places: int, scheduled: bool) -> None:
        self.cost, self.calibration = CostModel(), Calibration(num_places)
        self.counts, self.is_scheduled = SpeculationCounts(num_places), scheduled
        self.set_schedule("pays" if scheduled else "everything")
        self._logits: dict[str, np.ndarray] = {}
        self._unknown = np.full(num_places, np.nan)

    def set_schedule(self, name: str, **values: int) -> None:
        """Who decides from now on: "everything", "pays", or for `deepinfer-plugin verify` "random" with a seed.

        Raises:
            ValueError: another name.
        """
        self.schedule: Schedule
        if name == "everything":
            self.schedule = Everything()
        elif name == "pays":
            self.schedule = WhatPays(self.counts.num_places, self.cost, self.calibration)
        elif name == "random":
            self.schedule = AnyNumber(**values)
        else:
            raise ValueError(f"schedule: must be everything, pays or random, got {name!r}")

    def forget(self) -> None:
        """What was counted; what was measured and learnt stays."""
        self.counts = SpeculationCounts(self.counts.num_places)

    def numbers(self) -> Numbers:
        cost, counts = self.cost, self.counts
        error = cost.error / cost.measured if cost.measured else 0.0
        named = vars(counts) | {"calibration_error": self.calibration.error(), "cost_error": error}
        return {name: np.asarray(named[name], dtype=np.float64) for name in (*TOTALS, *BY_PLACE)}

    def admit(self, drafted: Drafted, load: Load) -> list[int]:
        """How many of each request's drafts are to be verified."""
        self._logits = dict(zip(drafted.names, drafted.logits, strict=True))
        admitted = self.schedule.admit(drafted, load)
        self.counts.observe_drafts(np.array(admitted))
        return admitted

    def logits_of(self, name: str) -> np.ndarray:
        """Of the confidences in a request's drafts under way; NaN where somebody else drafted."""
        return self._logits.get(name, self._unknown)

    def observe(self, logits: np.ndarray, verified: np.ndarray, emitted: np.ndarray) -> None:
        """A round of [num_requests] that verified drafts.

        logits: [num_requests, num_places], of the confidences; emitted: accepted drafts and the token behind them.
        """
        self.counts.observe_verification(verified, emitted)
        known = ~np.isnan(logits).all(1)
        self.calibration.observe(logits[known], verified[known], emitted[known] - 1)
        if self.reporter is not None:
            self.reporter.report(self.numbers())
