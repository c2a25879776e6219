"""`store_kv_cache`: what lands where, what stays as it was, and what is refused."""

import pytest
import torch

from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.store_kv_cache import store_kv_cache

SIZE, WIDTH = 4, 8


def make_cache(num_blocks: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Blocks with a gap of three rows and five elements behind each: the stride is no multiple of a row."""
    stride = (SIZE + 3) * WIDTH + 5
    memory = torch.full((num_blocks * stride,), -7.0, dtype=dtype, device=device)
    return memory.as_strided((num_blocks, SIZE, WIDTH), (stride, WIDTH, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 16])
def test_equals_a_loop_over_rows_and_writes_nothing_else(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    cache = make_cache(6, dtype, device)
    want = cache.clone()
    rows = torch.randn(num_tokens, WIDTH, device=device)
    slots = torch.randperm(6 * SIZE, device=device)[:num_tokens]
    for row, slot in zip(rows, slots.tolist(), strict=True):
        want[slot // SIZE, slot % SIZE] = row.to(dtype)
    store_kv_cache(rows, cache, slots)
    assert torch.equal(cache, want)
    gaps = torch.as_strided(cache, (5, 3 * WIDTH + 5), (cache.stride(0), 1), SIZE * WIDTH)
    assert (gaps == -7.0).all()


def test_leaves_out_rows_with_slot_minus_one(device: str) -> None:
    cache = make_cache(2, torch.float32, device)
    rows = torch.stack([torch.full((WIDTH,), value, device=device) for value in (1.0, float("nan"), 2.0)])
    store_kv_cache(rows, cache, torch.tensor([5, -1, 0], device=device))
    assert cache[:, :, 0].tolist() == [[2, -7, -7, -7], [-7, 1, -7, -7]]


def test_stores_nothing_for_a_batch_of_padding(device: str) -> None:
    cache = make_cache(2, torch.float32, device)
    store_kv_cache(torch.ones(3, WIDTH, device=device), cache, torch.full((3,), -1, device=device))
    assert (cache == -7.0).all()


def test_pages_read_what_was_stored(device: str) -> None:
    cache = make_cache(4, torch.float32, device)
    table = torch.tensor([[3, 1]], dtype=torch.int32, device=device)
    pages = Pages(cache, table, torch.zeros(6, dtype=torch.int64, device=device))
    states, rows = torch.arange(1, 7, device=device), torch.randn(6, 2 * WIDTH, device=device)[:, ::2]
    store_kv_cache(rows, cache, pages.slots(states))
    assert torch.equal(pages.gather_states(states), rows)


@pytest.mark.parametrize(
    "rows, cache, slots", [((3, 8), (2, 4, 6), (3,)), ((3, 8), (2, 4, 8), (2,)), ((3, 8), (8, 8), (3,))]
)
def test_refuses(rows: tuple[int, ...], cache: tuple[int, ...], slots: tuple[int, ...], device: str) -> None:
    with pytest.raises(ValueError, match="store_kv_cache: "):
        store_kv_cache(
            torch.zeros(rows, device=device),
            torch.zeros(cache, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
        )
