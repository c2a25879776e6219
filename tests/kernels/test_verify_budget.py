"""`verify_budget`: the kernel against the reference and a brute-force split, its ties, and what it refuses."""

import random

import pytest
import torch

from deepinfer_plugin.kernels.verify_budget import TABLE, verify_budget


def brute_force(survival: list[list[float]], budget: int) -> list[int]:
    """The specification's order, spelt out: larger survival, then smaller place, then smaller row."""
    slots = [(-s, j, r) for r, row in enumerate(survival) for j, s in enumerate(row) if s != float("-inf")]
    admitted = [0] * len(survival)
    for _, _, row in sorted(slots)[:budget]:
        admitted[row] += 1
    return admitted


def random_survival(rng: random.Random) -> list[list[float]]:
    """Confidences with many ties, zeros and ones; some requests with fewer drafts."""
    requests, places = rng.randrange(1, 9), rng.randrange(1, 7)
    values = rng.choice([[0.0, 0.5, 1.0], [0.9, 0.95, 1.0], [rng.random() for _ in range(20)]])
    rows = []
    for _ in range(requests):
        available, survival, row = rng.randrange(places + 1), 1.0, []
        for place in range(places):
            survival *= rng.choice(values)
            row.append(survival if place < available else float("-inf"))
        rows.append(row)
    return rows


def test_equals_a_brute_force_split():
    rng = random.Random(0)
    for _ in range(100_000):
        rows = random_survival(rng)
        budget = rng.randrange(len(rows) * len(rows[0]) + 2)
        survival = torch.tensor(rows)
        want = brute_force(survival.tolist(), budget)
        assert TABLE.load("reference")(survival, budget).tolist() == want


@pytest.mark.parametrize("num_requests", [0, 1, 7, 300])
@pytest.mark.parametrize("num_places", [1, 5, 8])
def test_equals_reference(num_requests, num_places, device):
    confidences = torch.randint(0, 4, (num_requests, num_places)) / 3  # ties
    survival = confidences.cumprod(1)
    survival[torch.rand(num_requests) < 0.3, num_places // 2 :] = -torch.inf
    for budget in (0, 1, num_requests, 2 * num_requests + 3, num_requests * num_places + 1):
        want = TABLE.load("reference")(survival, budget)
        torch.testing.assert_close(verify_budget(survival.to(device), budget).cpu(), want)


def test_takes_columns_of_a_wider_tensor(device):
    wide = torch.rand(6, 10).cumprod(1)
    got = verify_budget(wide.to(device)[:, ::2], 9)
    torch.testing.assert_close(got.cpu(), verify_budget(wide[:, ::2].contiguous().to(device), 9).cpu())


def test_earlier_places_win_ties_and_then_earlier_requests(device):
    assert verify_budget(torch.ones(3, 2, device=device), 4).tolist() == [2, 1, 1]


def test_a_later_draft_never_decides_about_an_earlier_one(device):
    """A request's admitted drafts do not change with the confidences behind the last of them that could matter."""
    survival = torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.4, 0.3]], device=device)
    changed = survival.clone()
    changed[0, 1:] = 0.0
    assert verify_budget(survival, 1).tolist()[0] == verify_budget(changed, 1).tolist()[0] == 1


@pytest.mark.parametrize(
    ("survival", "budget"),
    [(torch.zeros(3), 1), (torch.zeros(2, 2, dtype=torch.float64), 1), (torch.zeros(2, 2), -1)],
)
def test_refuses(survival, budget):
    with pytest.raises(ValueError, match="verify_budget: "):
        verify_budget(survival, budget)
