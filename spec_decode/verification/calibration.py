"""From the confidence head's logits to chances of acceptance, refitted while serving.

Only places that were verified and whose earlier drafts were all accepted count: at the others nothing was learnt.
Source: runtime specification, section 2.6, item 2.
"""

import numpy as np

BINS = 20  # of equal width in confidence
REFIT = 256  # observed rounds
STEPS = 20  # of Newton's method
KEPT = 0.75  # of the counts, at a refit: what is served changes
LARGEST = 60.0  # of a logit, as in training


class Calibration:
    """``confidence = sigmoid(slope_j * logit + offset_j)`` for place j; until something is learnt slope 1, offset 0."""

    def __init__(self, num_places: int) -> None:
        self.lines = np.tile(np.array([1.0, 0.0]), (num_places, 1))
        self.verified = np.zeros((num_places, BINS))
        self.accepted = np.zeros((num_places, BINS))
        self._logits = np.zeros((num_places, BINS))  # sums
        self._believed = np.zeros((num_places, BINS))  # sums of the confidences that were used
        self._rounds = 0

    def confidence(self, logits: np.ndarray) -> np.ndarray:
        """logits: [..., num_places]; the same shape, NaN counts as no confidence."""
        bounded = np.nan_to_num(logits, nan=-LARGEST).clip(-LARGEST, LARGEST)
        return _sigmoid(bounded * self.lines[:, 0] + self.lines[:, 1])

    def observe(self, logits: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Requests' rounds that are over.

        Args:
            logits: [num_requests, num_places], of their drafts.
            verified: [num_requests], how many of them were; accepted: how many of these, from the first on.
        """
        places = np.arange(logits.shape[1])
        reached = places < np.minimum(accepted + 1, verified)[:, None]
        _, place = reached.nonzero()
        logit = np.nan_to_num(logits[reached], nan=-LARGEST).clip(-LARGEST, LARGEST)
        slots = place, np.minimum((_sigmoid(logit) * BINS).astype(int), BINS - 1)
        np.add.at(self.verified, slots, 1)
        np.add.at(self.accepted, slots, (places < accepted[:, None])[reached])
        np.add.at(self._logits, slots, logit)
        np.add.at(self._believed, slots, _sigmoid(logit * self.lines[place, 0] + self.lines[place, 1]))
        self._rounds += int(reached.any(1).sum())
        if self._rounds >= REFIT:
            self._refit()

    def error(self) -> np.ndarray:
        """Expected calibration error of each place: the mean distance of confidence and acceptance over the bins."""
        gap = np.abs(self._believed - self.accepted).sum(1)
        return gap / np.maximum(self.verified.sum(1), 1)

    def rates(self) -> np.ndarray:
        """Share of each place's drafts that were accepted where all before were; a half of one more draft each."""
        return (self.accepted.sum(1) + 0.5) / (self.verified.sum(1) + 1)

    def _refit(self) -> None:
        for place, line in enumerate(self.lines):
            seen = self.verified[place] > 0
            if seen.any():
                counts = self.verified[place, seen]
                line[:] = _fitted(self._logits[place, seen] / counts, counts, self.accepted[place, seen])
        for counts in (self.verified, self.accepted, self._logits, self._believed):
            counts *= KEPT
        self._rounds = 0


def _fitted(logits: np.ndarray, counts: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Slope and offset with the largest likelihood, held towards 1 and 0 by a unit Gaussian; damped Newton steps."""
    inputs = np.stack([logits, np.ones_like(logits)], 1)
    plain = np.array([1.0, 0.0])
    line = plain.copy()

    def loss(line: np.ndarray) -> float:
        score = inputs @ line
        return float((counts * np.logaddexp(0, score) - accepted * score).sum() + ((line - plain) ** 2).sum() / 2)

    for _ in range(STEPS):
        p = _sigmoid(inputs @ line)
        gradient = inputs.T @ (counts * p - accepted) + (line - plain)
        curvature = (inputs * (counts * p * (1 - p))[:, None]).T @ inputs + np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        while loss(line - step) > loss(line) and np.abs(step).max() > 1e-9:
            step = step / 2
        line = line - step
    return line


def _sigmoid(x: np.ndarray | float) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(x, dtype=np.float64)))
