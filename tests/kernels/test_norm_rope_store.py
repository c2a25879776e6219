"""`norm_rope_store`: the ops that it joins, one after the other, whatever the cache holds."""

import pytest
import torch

from deepinfer_plugin.kernels.norm_rope_store import norm_rope_store
from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.kernels.rms_norm import rms_norm
from deepinfer_plugin.kernels.rope import rope
from tests.kernels.row_subsets import assert_rows_are_independent

EPS = 1e-20
KINDS = [(record, Record.PLAIN) for record in Record] + [(Record.PLAIN, r) for r in Record if r is not Record.PLAIN]


def new_cache(record: Record, width: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(9, 16, record.num_bytes(width), dtype=dtype if record is Record.PLAIN else torch.uint8).to(
        device
    )


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("record, rounded_as", KINDS)
@pytest.mark.parametrize("num_tokens, width, rotated", [(0, 64, 16), (1, 512, 64), (20, 128, 128)])
def test_is_the_ops_one_after_the_other(
    num_tokens: int,
    width: int,
    rotated: int,
    record: Record,
    rounded_as: Record,
    dtype: torch.dtype,
    normalises: bool,
    device: str,
) -> None:
    wide = torch.randn(num_tokens, 2 * width, device=device).to(dtype)
    x, weight = wide[:, width:], torch.randn(width, device=device).to(dtype) if normalises else None
    cos_sin = torch.randn(num_tokens, rotated, device=device)
    slots = torch.randperm(9 * 16, device=device)[:num_tokens]
    slots[2::3] = -1
    cache = new_cache(record, width, device, dtype)
    norm_rope_store(x, weight, EPS, cos_sin, cache, slots, record, rounded_as)
    rows = x if weight is None else rms_norm(x, weight, EPS)
    rows = rope(rows.unsqueeze(1), cos_sin).squeeze(1)
    want = rounded_as.decode(rounded_as.encode(rows))
    want = record.decode(record.encode(want)).to(dtype)
    stored = record.decode(cache).to(dtype).view(-1, width)
    left = torch.ones(len(stored), dtype=torch.bool, device=device)
    left[slots[slots >= 0]] = False
    assert not stored[left].any()
    got, want = stored[slots[slots >= 0]].double(), want[slots >= 0].double()
    # the sum of squares may run in another order: now and then a row's next number, which a rounding makes a step of
    near = (got - want).abs() <= 2**-7 * want.abs() + 1e-6
    steps = (got - want).abs() <= want.abs().amax(-1, keepdim=True) / 2 if num_tokens else near
    assert steps.all() and (near.double().mean() > 0.99 or not num_tokens)


@pytest.mark.parametrize("record, rounded_as", KINDS)
def test_rows_are_independent(record: Record, rounded_as: Record, device: str) -> None:
    x, weight = torch.randn(100, 128, device=device).bfloat16(), torch.randn(128, device=device).bfloat16()
    cos_sin = torch.randn(100, 32, device=device)

    def stored(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        cache, slots = new_cache(record, 128, device), torch.arange(len(x), device=device)
        norm_rope_store(x, weight, EPS, cos_sin, cache, slots, record, rounded_as)
        return cache.flatten(0, 1)[: len(x)]

    assert_rows_are_independent(stored, x, cos_sin)


def test_refuses(device: str) -> None:
    x, weight, cos_sin = (torch.zeros(*s, device=device) for s in ((2, 64), (64,), (2, 16)))
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    cache, packed = new_cache(Record.PLAIN, 64, device), new_cache(Record.FP8, 64, device)
    for args in (
        (x[:1], weight, cos_sin, cache, Record.PLAIN, Record.PLAIN),
        (x[:, 1:], weight, cos_sin, cache, Record.PLAIN, Record.PLAIN),
        (x, weight[1:], cos_sin, cache, Record.PLAIN, Record.PLAIN),
        (x, weight, cos_sin[:, 1:], cache, Record.PLAIN, Record.PLAIN),
        (x, weight, cos_sin.bfloat16(), cache, Record.PLAIN, Record.PLAIN),
        (x, weight, cos_sin, packed, Record.FP8, Record.FP8),
        (x, weight, cos_sin, packed[:, :, :64], Record.PLAIN, Record.PLAIN),
    ):
        x_, weight_, cos_sin_, cache_, record, rounded_as = args
        with pytest.raises(ValueError, match="norm_rope_store: "):
            norm_rope_store(x_, weight_, EPS, cos_sin_, cache_, slots, record, rounded_as)
