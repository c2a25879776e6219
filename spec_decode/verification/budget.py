"""How many drafts a round verifies: as many as pay, by confidences that are one generation old.

The number must not depend on the current confidences: a later one is computed from the drafts before it, and if it
could get them verified, being verified would tell something about them (runtime specification, sections 2.2 and 2.5).
"""

from collections.abc import Callable

import numpy as np


def best_budget(survival: np.ndarray, sampling: int, seconds: Callable[[np.ndarray], np.ndarray]) -> int:
    """The number of drafts with the most expected tokens a second; of equals the smallest.

    Args:
        survival: float64, one for each draft that can be verified, in any order.
        sampling: requests that get a token whether drafts are verified or not.
        seconds: of rounds that verify so many drafts, from none to all.

    Source: runtime specification, section 2.2.
    """
    gains = np.concatenate([[0.0], np.sort(survival)[::-1].cumsum()])
    return int(np.argmax((sampling + gains) / seconds(np.arange(len(gains)))))
