"""Who decides how many drafts are made and verified in a round: all of them, or those that pay."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from deepinfer_plugin.kernels.verify_budget import verify_budget
from deepinfer_plugin.spec_decode.verification.budget import best_budget
from deepinfer_plugin.spec_decode.verification.calibration import Calibration
from deepinfer_plugin.spec_decode.verification.cost_model import CostModel

SHORTEST = 1e-9  # seconds of a round of which nothing is known
PROBE = 128  # every so many rounds the other decision is tried once, so that its cost stays known


@dataclass(frozen=True)
class Load:
    """What the next round computes besides drafts.

    rows: of prefills and of the requests' newest tokens; sampling: requests that get a token; context: the rows' tokens
    before them, summed.
    """

    rows: int
    sampling: int
    context: float


@dataclass(frozen=True)
class Drafted:
    """A generation of drafts. names: of n requests; logits: float64 [n, num_places], of their confidences; room: int
    [n], how many of each one's may be verified."""

    names: list[str]
    logits: np.ndarray
    room: np.ndarray


class Schedule(Protocol):
    """Decides. Under coupled verification any decision gives the same text."""

    def wants_drafts(self, load: Load) -> bool:
        """Whether to draft at the end of this round."""

    def admit(self, drafted: Drafted, load: Load) -> list[int]:
        """How many of each request's drafts the next round verifies, from the first on."""

    def budget(self, survival: np.ndarray, load: Load) -> int:
        """How many drafts it verifies in all. survival: of each that can be, by confidences one generation old."""


class Everything:
    """Draft in every round, verify every draft."""

    def wants_drafts(self, load: Load) -> bool:
        return True

    def admit(self, drafted: Drafted, load: Load) -> list[int]:
        return drafted.room.tolist()

    def budget(self, survival: np.ndarray, load: Load) -> int:
        return len(survival)


class AnyNumber:
    """Any number of each request's drafts, and sometimes no drafts at all: to show that it does not matter."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def wants_drafts(self, load: Load) -> bool:
        return self._random.random() < 0.8

    def admit(self, drafted: Drafted, load: Load) -> list[int]:
        return [self._random.randint(0, int(room)) for room in drafted.room]

    def budget(self, survival: np.ndarray, load: Load) -> int:
        return self._random.randint(0, len(survival))


class WhatPays:
    """As many drafts as bring the most tokens a second, those that are likeliest to be reached and accepted.

    How many is decided by the confidences of the generation before, which of them by the current ones (runtime
    specification, sections 2.2 and 2.6).
    """

    def __init__(self, num_places: int, cost: CostModel, calibration: Calibration) -> None:
        self.num_places, self.cost, self.calibration = num_places, cost, calibration
        self._older: dict[str, np.ndarray] = {}
        self._rounds = 0

    def wants_drafts(self, load: Load) -> bool:
        self._rounds += 1
        usual = np.tile(self.calibration.rates().cumprod(), load.sampling)
        drafting = self._seconds(load, load.sampling)
        budget = best_budget(usual, load.sampling, drafting)
        tokens, most = load.sampling + np.sort(usual)[::-1][:budget].sum(), np.array([budget])
        pays = tokens / drafting(most)[0] >= load.sampling / self._seconds(load, 0)(np.array([0]))[0]
        return bool(pays) != (self._rounds % PROBE == 0)

    def admit(self, drafted: Drafted, load: Load) -> list[int]:
        confidence = self.calibration.confidence(drafted.logits)
        usual = self.calibration.rates()
        available = np.arange(self.num_places) < drafted.room[:, None]
        older = np.stack([self._older.get(name, usual) for name in drafted.names]).cumprod(1)
        budget = self.budget(older[available], load)
        self._older = dict(zip(drafted.names, confidence, strict=True))
        survival = np.where(available, confidence.cumprod(1), -np.inf)
        return verify_budget(torch.from_numpy(survival).float(), budget).tolist()

    def budget(self, survival: np.ndarray, load: Load) -> int:
        return best_budget(survival, load.sampling, self._seconds(load, load.sampling))

    def _seconds(self, load: Load, drafting: int) -> Callable[[np.ndarray], np.ndarray]:
        """Of rounds of this load that verify some drafts besides, and then draft for so many requests."""

        def seconds(drafts: np.ndarray) -> np.ndarray:
            context = load.context * (1 + drafts / max(load.rows, 1))
            return np.maximum(self.cost.round(load.rows + drafts, context, drafting), SHORTEST)

        return seconds
