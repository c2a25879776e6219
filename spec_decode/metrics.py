"""What is counted of speculation, in the process that does it."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class SpeculationCounts:
    """Since the start. Arrays are by place in a request's drafts, [num_places].

    drafted: made; scheduled: admitted to verification; verified: computed by the target, grammars and ends of requests
    having cut some; accepted: of these, from the first on, the target's own choice.
    rounds: of requests that verified drafts; emitted: tokens of these; budgets: drafts admitted in all, by round.
    """

    num_places: int
    rounds: int = 0
    emitted: int = 0
    engine_rounds: int = 0
    budget: int = 0  # summed
    drafted: np.ndarray = field(init=False)
    scheduled: np.ndarray = field(init=False)
    verified: np.ndarray = field(init=False)
    accepted: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.drafted, self.scheduled, self.verified, self.accepted = np.zeros((4, self.num_places), dtype=np.int64)

    def observe_drafts(self, admitted: np.ndarray) -> None:
        """A round of drafting. admitted: [num_requests], how many of each one's drafts are to be verified."""
        self.drafted += len(admitted)
        self.scheduled += (np.arange(self.num_places) < admitted[:, None]).sum(0)
        self.engine_rounds += 1
        self.budget += int(admitted.sum())

    def observe_verification(self, verified: np.ndarray, emitted: np.ndarray) -> None:
        """A round of [num_requests] that verified drafts; emitted: accepted drafts and the token behind them."""
        place = np.arange(self.num_places)
        self.verified += (place < verified[:, None]).sum(0)
        self.accepted += (place < emitted[:, None] - 1).sum(0)
        self.rounds += len(verified)
        self.emitted += int(emitted.sum())
