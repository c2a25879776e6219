"""`Pages`: slot numbers and rows of a paged cache, with blocks that stand apart and unused slots full of NaN."""

import pytest
import torch

from deepinfer_plugin.kernels.paged import Pages

SIZE, WIDTH = 4, 8


def make(device: str, dtype: torch.dtype = torch.float32) -> Pages:
    """Two requests of 10 and 5 states; state s of request r is a row of 100 * r + s. The tokens: requests 1, 0, 0."""
    cache = torch.full((6, SIZE + 3, WIDTH), float("nan"), dtype=dtype, device=device)[:, :SIZE]
    table = torch.tensor([[5, 0, 3, -1], [2, 4, 99, 99]], dtype=torch.int32, device=device)  # rubbish behind the end
    for request, count in enumerate((10, 5)):
        for state in range(count):
            cache[int(table[request, state // SIZE]), state % SIZE] = 100 * request + state
    return Pages(cache, table, torch.tensor([1, 0, 0], device=device))


def test_a_slot_is_block_times_block_size_plus_offset(device: str) -> None:
    pages = make(device)
    assert pages.slots(torch.tensor([4, 0, 9], device=device)).tolist() == [16, 20, 13]
    states = torch.tensor([[3, 4], [7, 8], [0, -1]], device=device)
    assert pages.slots(states).tolist() == [[11, 16], [3, 12], [20, -1]]


def test_a_negative_state_has_slot_minus_one_whatever_the_table_holds(device: str) -> None:
    pages = make(device)
    slots = pages.slots(torch.tensor([[-1, -7], [-1, -4], [-5, 2]], device=device))
    assert slots.tolist() == [[-1, -1], [-1, -1], [-1, 22]]
    assert slots.dtype == torch.int64


@pytest.mark.parametrize("states_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gathers_the_rows_of_each_request(dtype: torch.dtype, states_dtype: torch.dtype, device: str) -> None:
    pages = make(device, dtype)
    states = torch.tensor([[3, 4, -1], [7, -1, 9], [-1, 8, 0]], dtype=states_dtype, device=device)
    want = torch.tensor([[103, 104, 0], [7, 0, 9], [0, 8, 0]], dtype=dtype, device=device)
    for rows in (pages.gather_states(states), pages.gather(pages.slots(states))):
        assert rows.dtype == dtype
        assert torch.equal(rows, want.unsqueeze(2).expand(-1, -1, WIDTH))


def test_gathers_one_state_per_token(device: str) -> None:
    pages = make(device)
    states = torch.tensor([2, -1, 5], device=device)
    assert pages.gather_states(states)[:, 0].tolist() == [102, 0, 5]
    assert pages.gather(pages.slots(states))[:, 0].tolist() == [102, 0, 5]


def test_takes_no_tokens(device: str) -> None:
    pages = make(device)
    pages = Pages(pages.cache, pages.block_table, pages.request_ids[:0])
    assert pages.gather_states(torch.zeros(0, 3, dtype=torch.int64, device=device)).shape == (0, 3, WIDTH)
    assert pages.slots(torch.zeros(0, dtype=torch.int64, device=device)).shape == (0,)


@pytest.mark.parametrize(
    "cache, table, ids", [((4, 8), (2, 3), (1,)), ((4, 2, 8), (3,), (1,)), ((4, 2, 8), (2, 3), ())]
)
def test_refuses(cache: tuple[int, ...], table: tuple[int, ...], ids: tuple[int, ...], device: str) -> None:
    with pytest.raises(ValueError, match="paged: "):
        Pages(*(torch.zeros(shape, dtype=torch.int64, device=device) for shape in (cache, table, ids)))
