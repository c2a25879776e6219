"""`sparse_attention`: against float64 per head, its edges, rows that do not depend on their batch, and refusals."""

import math

import pytest
import torch

from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.kernels.sparse_attention import reference, sparse_attention
from tests.kernels.row_subsets import each_thread_count, is_interpreted

SIZE = 16  # states per block
# fp32: logits of size 10 with an error of 2**-24 * head_dim at most, hence the weights. bf16: one output rounding.
RTOL = {torch.float32: 5e-5, torch.bfloat16: 2**-8}


def paged(
    states: list[torch.Tensor], request_ids: list[int], spare_columns: int = 0, record: Record = Record.PLAIN
) -> Pages:
    """Each request's rows [n, d] in shuffled blocks that stand apart; whatever holds no row is NaN."""
    needed = [-(-rows.shape[0] // SIZE) for rows in states]
    device, width = states[0].device, states[0].shape[1]
    order = torch.randperm(sum(needed) + 1, device=device).int()
    nothing = float("nan") if states[0].is_floating_point() else 255
    cache = torch.full((order.numel(), SIZE + 2, width), nothing, dtype=states[0].dtype, device=device)[:, :SIZE]
    table = torch.zeros(len(states), max(1, *needed) + spare_columns, dtype=torch.int32, device=device)
    for request, rows in enumerate(states):
        blocks, order = order[: needed[request]], order[needed[request] :]
        table[request, : blocks.numel()] = blocks
        places = torch.arange(rows.shape[0], device=device)
        cache[blocks[places // SIZE].long(), places % SIZE] = rows
    return Pages(cache, table, torch.tensor(request_ids, dtype=torch.int64, device=device), record)


class Batch:
    """A prefill of 24 rows, decode rows at both ends of their sequences, a padding row; at most 10 entries a row."""

    WINDOW = 16
    LENGTHS = [40, 90, 5, 33]
    ROWS = [(0, p) for p in range(10, 34)] + [(1, 89), (2, 0), (0, -1), (2, 4), (3, 32), (1, 7), (3, 31)]

    def __init__(self, device: str, dtype: torch.dtype = torch.float32, heads: int = 4, head_dim: int = 64) -> None:
        count = len(self.ROWS)
        self.query = torch.randn(count, heads, head_dim, device=device).to(dtype)
        self.local, self.shared = (
            list(torch.randn(sum(self.LENGTHS), head_dim, device=device).to(dtype).split(self.LENGTHS)) for _ in "ls"
        )
        self.sink = torch.randn(heads, device=device)
        self.scale = head_dim**-0.5
        self.request_ids = [row[0] for row in self.ROWS]
        self.positions = torch.tensor([row[1] for row in self.ROWS], device=device)
        self.indices = torch.full((count, 10), -1, dtype=torch.int32, device=device)
        for row, (_, position) in enumerate(self.ROWS):
            chosen = torch.randperm(position + 1)[:10].sort().values
            self.indices[row, : chosen.numel()] = chosen

    def run(self, rows: list[int] | None = None, *, shared: bool = True, spare_columns: int = 0) -> torch.Tensor:
        rows = list(range(len(self.ROWS))) if rows is None else rows
        ids = [self.request_ids[row] for row in rows]
        selected = (paged(self.shared, ids, spare_columns), self.indices[rows]) if shared else (None, None)
        window = paged(self.local, ids, spare_columns)
        args = self.query[rows], window, self.positions[rows], self.WINDOW, *selected, self.sink, self.scale
        return sparse_attention(*args)

    def expected(self, row: int, *, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64, from the keys of this row only: softmax without sink, times its share of the whole.

        And the same sum over magnitudes, which bounds what rounding the weights can do.
        """
        request, position = self.ROWS[row]
        keys = self.local[request][max(0, position - self.WINDOW + 1) : position + 1]
        if shared:
            chosen = self.indices[row]
            keys = torch.cat((keys, self.shared[request][chosen[chosen >= 0].long()]))
        if not keys.shape[0]:
            nothing = torch.zeros_like(self.query[row], dtype=torch.float64)
            return nothing, nothing
        logits = self.query[row].double() @ keys.double().T * self.scale
        share = torch.sigmoid(logits.logsumexp(1) - self.sink.double())
        weights = share.unsqueeze(1) * logits.softmax(1)
        return weights @ keys.double(), weights @ keys.double().abs()


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("heads, head_dim", [(1, 16), (3, 40), (4, 64), (16, 512)])
def test_equals_softmax_times_the_share_of_the_keys(
    heads: int, head_dim: int, shared: bool, dtype: torch.dtype, device: str
) -> None:
    batch = Batch(device, dtype, heads, head_dim)
    got = batch.run(shared=shared)
    assert got.dtype == dtype
    both = [batch.expected(row, shared=shared) for row in range(len(batch.ROWS))]
    want, magnitude = (torch.stack(part) for part in zip(*both, strict=True))
    bound = RTOL[dtype] * want.abs() + 1e-6
    if dtype == torch.bfloat16:
        bound += 2**-8 * 1.01 * magnitude  # weights may be rounded to bf16; 1 %: fp32 before the rounding
    assert ((got.double() - want).abs() <= bound).all()


def one_row(device: str, position: int, window_size: int = 3, sink: float = 0.0, **selected: list) -> list[list[float]]:
    """Query (1, 0), scale 1; local row s is (0, s), global entry j is (log(j + 1), 0). One head."""
    local = torch.tensor([[0.0, float(s)] for s in range(20)], device=device)
    entries = torch.tensor([[math.log(j + 1), 0.0] for j in range(20)], device=device)
    indices = torch.tensor([selected["entries"]], dtype=torch.int32, device=device) if selected else None
    out = sparse_attention(
        torch.tensor([[[1.0, 0.0]]], device=device),
        paged([local], [0]),
        torch.tensor([position], device=device),
        window_size,
        paged([entries], [0]) if selected else None,
        indices,
        torch.tensor([sink], device=device),
        1.0,
    )
    return out[0, 0].tolist()


def test_the_window_counts_the_query_itself(device: str) -> None:
    # keys 7, 8, 9 and a sink of logit 0: four equal weights
    assert one_row(device, 9) == pytest.approx([0.0, (7 + 8 + 9) / 4])
    assert one_row(device, 1) == pytest.approx([0.0, 1 / 3])  # keys 0 and 1
    assert one_row(device, 9, window_size=1) == pytest.approx([0.0, 9 / 2])


def test_the_sink_only_enlarges_the_denominator(device: str) -> None:
    assert one_row(device, 9, sink=math.log(5.0)) == pytest.approx([0.0, 24 / 8])
    assert one_row(device, 9, sink=-200.0) == pytest.approx([0.0, 8.0])


def test_one_softmax_over_both_memories(device: str) -> None:
    # weights: window 1, 1, 1; entries 2 and 4 of logits log 3 and log 5; the sink 1
    got = one_row(device, 9, entries=[2, 4, -1, -1])
    assert got == pytest.approx([(3 * math.log(3) + 5 * math.log(5)) / 12, 24 / 12])


def test_a_token_in_both_memories_counts_twice(device: str) -> None:
    rows = torch.tensor([[1.0, 2.0]], device=device)
    args = torch.zeros(1, 1, 2, device=device), paged([rows], [0]), torch.tensor([0], device=device), 4
    indices, sink = torch.tensor([[0]], dtype=torch.int32, device=device), torch.zeros(1, device=device)
    assert sparse_attention(*args, paged([rows], [0]), indices, sink, 1.0)[0, 0].tolist() == pytest.approx(
        [2 / 3, 4 / 3]
    )


@pytest.mark.parametrize("shared", [False, True])
def test_no_keys_give_zero_even_for_a_query_of_nan(shared: bool, device: str) -> None:
    batch = Batch(device)
    padding = batch.ROWS.index((0, -1))
    want = batch.run(shared=shared)
    batch.query[padding] = float("nan")
    got = batch.run(shared=shared)
    assert not got[padding].any() and torch.equal(got, want)


def test_a_batch_of_padding_reads_nothing(device: str) -> None:
    cache = torch.full((2, SIZE, 8), float("nan"), device=device)
    table = torch.full((1, 1), 7, dtype=torch.int32, device=device)
    pages = Pages(cache, table, torch.zeros(3, dtype=torch.int64, device=device))
    positions, indices = torch.full((3,), -1, device=device), torch.full((3, 5), -1, dtype=torch.int32, device=device)
    sink = torch.zeros(2, device=device)
    got = sparse_attention(torch.ones(3, 2, 8, device=device), pages, positions, 4, pages, indices, sink, 1.0)
    assert torch.equal(got, torch.zeros(3, 2, 8, device=device))


def test_takes_no_rows(device: str) -> None:
    assert Batch(device).run(rows=[]).shape == (0, 4, 64)


def test_takes_heads_of_a_wider_tensor(device: str) -> None:
    batch = Batch(device)
    want = batch.run()
    batch.query = torch.cat((batch.query, batch.query), dim=1)[:, 2:6].roll(2, dims=1)
    batch.query = torch.stack((batch.query, batch.query), dim=3)[..., 0]
    assert torch.equal(batch.run(), want)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("heads, head_dim", [(1, 16), (4, 64), (16, 512), (64, 512)])
def test_a_row_does_not_depend_on_the_others(
    heads: int, head_dim: int, shared: bool, dtype: torch.dtype, device: str
) -> None:
    batch = Batch(device, dtype, heads, head_dim)
    whole = batch.run(shared=shared)
    shuffled = torch.randperm(len(batch.ROWS)).tolist()
    subsets = [[row] for row in range(0, len(batch.ROWS), 4)] + [list(range(24)), list(range(3, 11)), [24, 25, 28, 30]]
    subsets = subsets[3::4] if is_interpreted else subsets
    for _ in each_thread_count():
        for spare_columns, rows in [(0, shuffled), (3, shuffled[:11]), *((5, rows) for rows in subsets)]:
            assert torch.equal(batch.run(rows, shared=shared, spare_columns=spare_columns), whole[rows])


@pytest.mark.parametrize("local, shared", [(Record.FP8, Record.FP8), (Record.FP8, Record.FP4_KV)])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("heads, head_dim", [(4, 64), (3, 96), (16, 512)])
def test_records_give_what_their_decoded_rows_give(
    heads: int, head_dim: int, dtype: torch.dtype, local: Record, shared: Record, device: str
) -> None:
    """A decoded record is exact in bf16, so packed and plain caches hold the same numbers."""
    batch = Batch(device, dtype, heads, head_dim)
    packed = []
    for states, record in ((batch.local, local), (batch.shared, shared)):
        records = [record.encode(part) for part in states]
        states[:] = [record.decode(part).to(dtype) for part in records]
        packed.append(paged(records, batch.request_ids, record=record))
    window, selected = packed
    args = batch.query, window, batch.positions, batch.WINDOW, selected, batch.indices, batch.sink, batch.scale
    got, want = sparse_attention(*args), batch.run()
    if device == "cpu":
        assert torch.equal(got, want)
    else:  # reading rows another way is other code around the same sums, whose order may differ
        torch.testing.assert_close(got, want, rtol=RTOL[dtype], atol=RTOL[dtype] * float(want.abs().max()))


@pytest.mark.parametrize("tile_bytes", [1, 4 * 26 * 64 * 7])  # tiles of 1 and 7 rows
@pytest.mark.parametrize("shared", [False, True])
def test_small_tiles_give_the_same(shared: bool, tile_bytes: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(device)
    want = batch.run(shared=shared)
    monkeypatch.setattr(reference, "TILE_BYTES", tile_bytes)
    assert torch.equal(batch.run(shared=shared), want)


def test_refuses(device: str) -> None:
    batch = Batch(device)
    window, shared = paged(batch.local, batch.request_ids), paged(batch.shared, batch.request_ids)
    good = [batch.query, window, batch.positions, 16, shared, batch.indices, batch.sink, 1.0]
    sparse_attention(*good)
    for index, value in [
        (0, batch.query[0]),
        (0, batch.query[:, :, :32]),
        (0, batch.query[:5]),
        (2, batch.positions[:5]),
        (3, 0),
        (4, None),
        (4, paged(batch.shared, batch.request_ids[:5])),
        (5, None),
        (5, batch.indices[:5]),
        (6, batch.sink[:3]),
    ]:
        bad = list(good)
        bad[index] = value
        with pytest.raises(ValueError, match="sparse_attention: "):
            sparse_attention(*bad)
