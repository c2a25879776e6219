"""`accept_drafts`: the kernel against the reference, and both against the rule written out in Python."""

import random

import pytest
import torch

from deepinfer_plugin.kernels.accept_drafts import accept_drafts


def by_hand(chosen: list[int], drafts: list[int], first_rows: list[int]) -> list[list[int]]:
    emitted = []
    for first, end in zip(first_rows, first_rows[1:], strict=False):
        tokens = [chosen[first]]
        for row in range(first + 1, end):
            if drafts[row] < 0 or drafts[row] != tokens[-1]:
                break
            tokens.append(chosen[row])
        emitted.append(tokens)
    return emitted


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equals_the_rule_written_out(dtype, device):
    rng = random.Random(0)
    for _ in range(200):
        rows = [rng.randint(1, 6) for _ in range(rng.randint(1, 8))]
        first_rows = [sum(rows[:n]) for n in range(len(rows) + 1)]
        # few tokens, so that many are foreseen; placeholders; a choice of -1 never occurs
        chosen = [rng.randrange(2) for _ in range(first_rows[-1])]
        drafts = [rng.choice([0, 1, 1, 0, -1]) for _ in chosen]
        tokens, emitted = accept_drafts(
            torch.tensor(chosen, device=device),
            torch.tensor(drafts, dtype=dtype, device=device),
            torch.tensor(first_rows, dtype=torch.int32, device=device),
            7,
        )
        want = by_hand(chosen, drafts, first_rows)
        assert emitted.tolist() == [len(own) for own in want]
        assert tokens.tolist() == [own + [-1] * (7 - len(own)) for own in want]


def test_without_requests(device):
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    tokens, emitted = accept_drafts(nothing, nothing, torch.zeros(1, dtype=torch.int32, device=device), 3)
    assert tokens.shape == (0, 3) and emitted.shape == (0,)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"chosen": torch.zeros(2)}, "chosen must be int64"),
        ({"drafts": torch.zeros(3, dtype=torch.int64)}, "drafts must be integers"),
        ({"drafts": torch.zeros(2)}, "drafts must be integers"),
        ({"first_rows": torch.zeros(2, dtype=torch.int64)}, "first_rows must be int32"),
        ({"width": 0}, "width must be at least 1"),
    ],
)
def test_refuses(change, what):
    zeros = torch.zeros(2, dtype=torch.int64)
    arguments = {"chosen": zeros, "drafts": zeros, "first_rows": torch.tensor([0, 2], dtype=torch.int32), "width": 2}
    with pytest.raises(ValueError, match=what):
        accept_drafts(**{**arguments, **change})
