"""`cache_slots`: where rows of several requests lie."""

import pytest
import torch

from deepinfer_plugin.kernels.cache_slots import cache_slots
from deepinfer_plugin.kernels.paged import Pages
from tests.kernels.row_subsets import assert_rows_are_independent


def pages_of(num_tokens: int, device: str, states_per_block: int = 16) -> Pages:
    table = torch.randint(0, 1000, (3, 14), dtype=torch.int32, device=device)[:, ::2]
    cache = torch.zeros(1, states_per_block, 2, device=device)
    return Pages(cache, table, torch.randint(0, 3, (num_tokens,), device=device))


@pytest.mark.parametrize("num_tokens", [0, 1, 20, 300])
@pytest.mark.parametrize("states_per_block", [1, 16, 64])
def test_is_block_and_offset(states_per_block: int, num_tokens: int, device: str) -> None:
    pages = pages_of(num_tokens, device, states_per_block)
    states = torch.randint(-3, 7 * states_per_block, (num_tokens,), device=device)
    want = [
        -1 if s < 0 else int(pages.block_table[r, s // states_per_block]) * states_per_block + s % states_per_block
        for s, r in zip(states.tolist(), pages.request_ids.tolist(), strict=True)
    ]
    assert cache_slots(pages, states).tolist() == want


def test_rows_are_independent(device: str) -> None:
    pages = pages_of(100, device)
    states = torch.randint(-3, 100, (100,), device=device)

    def slots(request_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return cache_slots(Pages(pages.cache, pages.block_table, request_ids), states)

    assert_rows_are_independent(slots, pages.request_ids, states)


def test_names_what_does_not_fit(device: str) -> None:
    with pytest.raises(ValueError, match=r"cache_slots: .* got \(4,\) for \(5,\)"):
        cache_slots(pages_of(5, device), torch.zeros(4, dtype=torch.int64, device=device))
