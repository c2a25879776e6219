"""`engram_hash` against Python's integers and the released constants; `engram_lookup` against a loop over rows."""

import numpy as np
import pytest
import torch

from deepinfer_plugin.kernels.engram_lookup import engram_hash, engram_lookup

NUM_CLASSES = 99092
MULTIPLIERS = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}
PRIMES = {
    1: [16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183]
    + [16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321]
    + [16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463],
    14: [16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627]
    + [16000667, 16000669, 16000693, 16000697, 16000711, 16000729, 16000759, 16000769]
    + [16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889],
}
NUM_ROWS = {1: 384006168, 14: 384016682}


def constants(layer: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    primes = torch.tensor(PRIMES[layer], device=device)
    return torch.tensor(MULTIPLIERS[layer], device=device), primes.view(3, 8), primes.cumsum(0) - primes


def hash_in_python(classes: list[int], layer: int) -> list[int]:
    rows, roll, offset = [], classes[0] * MULTIPLIERS[layer][0], 0
    for order in range(3):
        roll ^= classes[order + 1] * MULTIPLIERS[layer][order + 1]
        for prime in PRIMES[layer][8 * order : 8 * order + 8]:
            rows.append(roll % prime + offset)
            offset += prime
    return rows


@pytest.mark.parametrize("layer", MULTIPLIERS)
def test_the_constants_are_those_of_the_released_model(layer: int) -> None:
    bound = max(1, (2**63 - 1) // NUM_CLASSES // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=4, dtype=np.int64) * 2 + 1
    assert drawn.tolist() == MULTIPLIERS[layer]
    assert sum(PRIMES[layer]) == NUM_ROWS[layer]


@pytest.mark.parametrize("layer", MULTIPLIERS)
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_hash_equals_unbounded_integers(num_tokens: int, layer: int, device: str) -> None:
    class_ids = torch.randint(0, NUM_CLASSES, (num_tokens, 4), device=device)
    class_ids[-1:] = NUM_CLASSES - 1  # the largest products
    rows = engram_hash(class_ids, *constants(layer, device))
    assert rows.shape == (num_tokens, 24)
    assert rows.tolist() == [hash_in_python(classes, layer) for classes in class_ids.tolist()]
    assert num_tokens == 0 or (rows.min() >= 0 and rows.max() < NUM_ROWS[layer])


def test_hash_of_a_hand_computed_row(device: str) -> None:
    # rolls: 2 * 3 ^ 1 * 5 = 3; 3 ^ 4 * 7 = 31; 31 ^ 0 * 9 = 31
    args = ([[2, 1, 4, 0]], [3, 5, 7, 9], [[2, 3], [5, 7], [11, 13]], [0, 2, 5, 10, 17, 28])
    assert engram_hash(*(torch.tensor(arg, device=device) for arg in args)).tolist() == [[1, 2, 6, 13, 26, 33]]


def test_the_hash_of_a_row_does_not_depend_on_the_others(device: str) -> None:
    class_ids = torch.randint(0, NUM_CLASSES, (19, 4), device=device)
    whole = engram_hash(class_ids, *constants(1, device))
    order = torch.randperm(19, device=device)
    assert torch.equal(engram_hash(class_ids[order], *constants(1, device)), whole[order])


def make_table(num_rows: int, head_dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and exponents 2**-13 .. 2**12; NaN codes (0x7f, 0xff) do not occur in a checkpoint."""
    codes = torch.randint(0, 256, (num_rows, head_dim), dtype=torch.uint8, device=device)
    codes[(codes & 0x7F) == 0x7F] = 0
    sf = torch.randint(114, 140, (num_rows, head_dim // 32), dtype=torch.uint8, device=device)
    return codes.view(torch.float8_e4m3fn), sf


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize("head_dim", [32, 256])
def test_lookup_equals_a_loop_over_rows(num_tokens: int, head_dim: int, device: str) -> None:
    table, sf = make_table(50, head_dim, device)
    rows = torch.randint(0, 50, (num_tokens, 6), device=device)
    got = engram_lookup(rows, table, sf, 0)
    assert got.shape == (num_tokens, 6 * head_dim) and got.dtype == torch.float32
    for token, columns in enumerate(rows.tolist()):
        for column, row in enumerate(columns):
            want = table[row].float() * 2.0 ** (sf[row].double() - 127).float().repeat_interleave(32)
            assert torch.equal(got[token, column * head_dim : (column + 1) * head_dim], want)


def test_one_scale_per_32_channels(device: str) -> None:
    table = torch.full((1, 64), 1.5, device=device).to(torch.float8_e4m3fn)
    sf = torch.tensor([[127, 129]], dtype=torch.uint8, device=device)
    got = engram_lookup(torch.zeros(1, 1, dtype=torch.int64, device=device), table, sf, 0)
    assert got.tolist() == [[1.5] * 32 + [6.0] * 32]


def test_the_exponent_bytes_may_come_as_e8m0(device: str) -> None:
    table, sf = make_table(8, 64, device)
    rows = torch.randint(0, 8, (3, 4), device=device)
    assert torch.equal(engram_lookup(rows, table, sf.view(torch.float8_e8m0fnu), 0), engram_lookup(rows, table, sf, 0))


def test_shards_sum_to_the_whole_and_give_zeros_elsewhere(device: str) -> None:
    table, sf = make_table(30, 32, device)
    rows = torch.randint(0, 30, (11, 6), device=device)
    rows[4] = -1
    bounds = [(0, 7), (7, 19), (19, 30)]
    shards = [engram_lookup(rows, table[first:last], sf[first:last], first) for first, last in bounds]
    whole = engram_lookup(rows, table, sf, 0)
    assert torch.equal(sum(shards), whole)
    assert not whole[4].any() and not shards[1][4].any()
    assert not shards[0][0].view(6, 32)[rows[0] >= 7].any()


def test_rows_of_other_shards_read_nothing(device: str) -> None:
    table = torch.full((2, 32), float("nan"), device=device).to(torch.float8_e4m3fn)
    sf = torch.full((2, 1), 127, dtype=torch.uint8, device=device)
    rows = torch.tensor([[-1, 9, 12, 4]], device=device)
    assert not engram_lookup(rows, table, sf, 10).any()


def test_takes_a_strided_table(device: str) -> None:
    codes, sf = make_table(9, 128, device)
    rows = torch.randint(0, 9, (3, 2), device=device)
    got = engram_lookup(rows, codes[:, :64], sf[:, ::2], 0)
    assert torch.equal(got, engram_lookup(rows, codes[:, :64].contiguous(), sf[:, ::2].contiguous(), 0))


def test_hash_refuses(device: str) -> None:
    good = [torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((5, 4), (4,), (3, 2), (6,))]
    for index, shape in enumerate([(5, 3), (3,), (2, 2), (5,)]):
        bad = list(good)
        bad[index] = torch.zeros(shape, dtype=torch.int64, device=device)
        with pytest.raises(ValueError, match="engram_hash: "):
            engram_hash(*bad)


def test_lookup_refuses(device: str) -> None:
    table, sf = make_table(4, 64, device)
    rows = torch.zeros(2, 3, dtype=torch.int64, device=device)
    for bad in (
        (rows[0], table, sf),
        (rows, table.float(), sf),
        (rows, table[:0], sf[:0]),
        (rows, table[:, :40], sf),
        (rows, table, sf[:, :1]),
        (rows, table, sf.float()),
    ):
        with pytest.raises(ValueError, match="engram_lookup: "):
            engram_lookup(*bad, 0)
