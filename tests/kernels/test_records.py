"""`Record`: sizes, exact round trips against the quantisers, bytes by hand, caches of records."""

import pytest
import torch

from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.quant_formats import round_fp4_index, round_fp4_kv, round_fp8
from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.kernels.store_kv_cache import store_kv_cache

OPS = ["store_kv_cache"]
ROUNDERS = {Record.FP8: round_fp8, Record.FP4_KV: round_fp4_kv, Record.FP4_INDEX: round_fp4_index}


def random_rows(num_rows: int, width: int, device: str) -> torch.Tensor:
    """Magnitudes over many binades, zeros and negative zeros among them."""
    binades = torch.randint(-12, 12, (num_rows, width // 16), device=device).repeat_interleave(16, 1)
    rows = torch.randn(num_rows, width, device=device) * torch.exp2(binades.float())
    rows[:, :3] = torch.tensor([0.0, -0.0, 1e-30], device=device)
    rows[0] = 0
    return rows


@pytest.mark.parametrize(
    "record, width, size", [(Record.FP8, 512, 528), (Record.FP4_KV, 512, 288), (Record.FP4_INDEX, 128, 68)]
)
def test_sizes_are_those_of_the_specification(record: Record, width: int, size: int) -> None:
    assert record.num_bytes(width) == size and record.width(size) == width
    assert Record.PLAIN.num_bytes(width) == Record.PLAIN.width(width) == width


@pytest.mark.parametrize("record", ROUNDERS, ids=lambda r: r.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoded_record_is_the_rounded_row(record: Record, dtype: torch.dtype, device: str) -> None:
    rows = random_rows(40, 128, device).to(dtype)
    records = record.encode(rows)
    assert records.dtype == torch.uint8 and records.shape == (40, record.num_bytes(128))
    assert torch.equal(record.decode(records), ROUNDERS[record](rows).float())
    assert record.decode(record.encode(rows[:0])).shape == (0, 128)
    assert torch.equal(record.decode(records.view(2, 20, -1)), record.decode(records).view(2, 20, 128))


def test_bytes_by_hand(device: str) -> None:
    row = torch.zeros(1, 32, device=device)
    row[0, :4] = torch.tensor([448.0, -1.0, 0.25, 2.0], device=device)
    record = Record.FP8.encode(row)[0].tolist()
    assert record[:4] == [0x7E, 0xB8, 0x28, 0x40] and record[32] == 127
    row[0, :4] = torch.tensor([6.0, -1.0, 0.5, 2.0], device=device)
    assert Record.FP4_INDEX.encode(row)[0].tolist() == [0xA7, 0x41, *[0] * 14, 127]
    record = Record.FP4_KV.encode(row)[0].tolist()
    assert record[:2] == [0xA7, 0x41] and record[16:] == [0x38, 0x01]  # scales 1 and, of zeros, 2 ** -9


@pytest.mark.parametrize("record", ROUNDERS, ids=lambda r: r.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [32, 96, 512])
def test_stored_records_are_the_encoded_rows(record: Record, width: int, dtype: torch.dtype, device: str) -> None:
    rows = random_rows(9, width, device).to(dtype)
    cache = torch.full((3, 4 + 2, record.num_bytes(width)), 255, dtype=torch.uint8, device=device)[:, :4]
    slots = torch.tensor([3, 0, 11, -1, 5, 7, -1, 8, 2], device=device)
    want = cache.clone()
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot >= 0:
            want[slot // 4, slot % 4] = record.encode(row)
    store_kv_cache(rows, cache, slots, record)
    assert torch.equal(cache, want)
    pages = Pages(cache, torch.arange(3, dtype=torch.int32, device=device)[None], slots.new_zeros(9), record)
    assert pages.width == width
    stored = slots >= 0
    got = pages.gather(slots)
    assert torch.equal(got[stored], ROUNDERS[record](rows).float()[stored]) and not got[~stored].any()


def test_a_cache_of_numbers_may_hold_integers(device: str) -> None:
    """Token ids, for example."""
    cache, slots = torch.zeros(2, 4, 1, dtype=torch.int32, device=device), torch.tensor([6, -1, 1], device=device)
    store_kv_cache(torch.tensor([[70000], [5], [-3]], device=device), cache, slots)
    pages = Pages(cache, torch.arange(2, dtype=torch.int32, device=device)[None], slots.new_zeros(3))
    assert pages.gather(slots).flatten().tolist() == [70000, 0, -3]
    assert cache.flatten().tolist() == [0, -3, 0, 0, 0, 0, 70000, 0]


def test_refuses(device: str) -> None:
    rows, slots = torch.zeros(2, 32, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    plain = torch.zeros(1, 4, 32, device=device)
    for cache, record in ((plain, Record.FP8), (plain.byte(), Record.PLAIN), (plain.byte(), Record.FP8)):
        with pytest.raises(ValueError, match="store_kv_cache: "):
            store_kv_cache(rows, cache, slots, record)
    with pytest.raises(ValueError, match="paged: a cache of fp8 records cannot be torch.float32"):
        Pages(plain, slots[None].int(), slots, Record.FP8)
