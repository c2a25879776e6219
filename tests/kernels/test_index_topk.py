"""The indexer's three ops: the selection rules, exact on integers; rows that do not depend on their batch; refusals."""

import pytest
import torch

from deepinfer_plugin.kernels.index_topk import index_topk, index_topk_with_candidates, reference, topk_candidate_blocks
from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.records import Record
from tests.kernels.row_subsets import each_thread_count

SIZE = 16  # states per block


def paged(
    states: list[torch.Tensor], request_ids: list[int], spare_columns: int = 0, record: Record = Record.PLAIN
) -> Pages:
    """Each request's keys [n, d] in shuffled blocks that stand apart; whatever holds no key is NaN."""
    needed = [-(-keys.shape[0] // SIZE) for keys in states]
    device, head_dim = states[0].device, states[0].shape[1]
    order = torch.randperm(sum(needed) + 1, device=device).int()
    nothing = float("nan") if states[0].is_floating_point() else 255
    cache = torch.full((order.numel(), SIZE + 2, head_dim), nothing, dtype=states[0].dtype, device=device)[:, :SIZE]
    table = torch.zeros(len(states), max(1, *needed) + spare_columns, dtype=torch.int32, device=device)
    for request, keys in enumerate(states):
        blocks, order = order[: needed[request]], order[needed[request] :]
        table[request, : blocks.numel()] = blocks
        places = torch.arange(keys.shape[0], device=device)
        cache[blocks[places // SIZE].long(), places % SIZE] = keys
    return Pages(cache, table, torch.tensor(request_ids, dtype=torch.int64, device=device), record)


class Batch:
    """Rows of several requests, integer-valued (every score is exact, and ties are many) or normally distributed."""

    def __init__(
        self, lengths: list[int], rows: list[tuple[int, int]], device: str, *, exact: bool, **sizes: int
    ) -> None:
        heads, head_dim = sizes.get("heads", 4), sizes.get("head_dim", 32)
        shapes = (len(rows), heads, head_dim), (len(rows), heads), (sum(lengths), head_dim)
        draw = (
            (lambda s: torch.randint(-2, 3, s, device=device).float())
            if exact
            else lambda s: torch.randn(s, device=device)
        )
        self.query, self.weights, keys = map(draw, shapes)
        self.keys = list(keys.split(lengths))
        self.request_ids, self.num_visible = (
            [row[0] for row in rows],
            torch.tensor([row[1] for row in rows], device=device),
        )

    def to(self, dtype: torch.dtype) -> "Batch":
        self.query, self.weights = self.query.to(dtype), self.weights.to(dtype)
        self.keys = [keys.to(dtype) for keys in self.keys]
        return self

    def args(self, rows: list[int] | None = None, spare_columns: int = 0) -> tuple:
        rows = list(range(len(self.request_ids))) if rows is None else rows
        pages = paged(self.keys, [self.request_ids[row] for row in rows], spare_columns)
        return self.query[rows], self.weights[rows], pages, self.num_visible[rows]

    def scores(self, row: int) -> list[float]:
        """Of the row's visible entries, in float64 and one head after the other."""
        keys = self.keys[self.request_ids[row]][: int(self.num_visible[row])].double()
        scores = torch.zeros(keys.shape[0], dtype=torch.float64, device=keys.device)
        for query, weight in zip(self.query[row].double(), self.weights[row].double(), strict=True):
            scores += weight * (keys @ query).clamp(min=0)
        return scores.tolist()


def best(scores: dict[int, float], count: int) -> list[int]:
    chosen = sorted(sorted(scores, key=lambda index: (-scores[index], index))[:count])
    return chosen + [-1] * (count - len(chosen))


def best_blocks(scores: list[float], num_blocks: int, block_size: int) -> list[int]:
    blocks = {
        first // block_size: max(scores[first : first + block_size]) for first in range(0, len(scores), block_size)
    }
    if blocks:
        blocks[max(blocks)] = float("inf")
    return best(blocks, num_blocks)


# a prefill of 40 rows; a padding row; decode rows; a verify of 3 rows; a request whose rows are not neighbours
LENGTHS = [150, 70, 200, 20, 129]
ROWS = [(0, n) for n in range(101, 141)] + [
    (0, 0),
    (1, 64),
    (2, 200),
    (3, 17),
    (4, 127),
    (4, 128),
    (4, 129),
    (2, 1),
    (1, 70),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("topk", [1, 16, 50, 200])
def test_equals_a_sort_by_score_then_index(topk: int, dtype: torch.dtype, device: str) -> None:
    batch = Batch(LENGTHS, ROWS, device, exact=True).to(dtype)
    got = index_topk(*batch.args(), topk, None, 8)
    assert got.dtype == torch.int32
    assert got.tolist() == [best(dict(enumerate(batch.scores(row))), topk) for row in range(len(ROWS))]


@pytest.mark.parametrize("num_blocks, block_size", [(1, 8), (4, 8), (5, 16), (8, 8), (9, 5), (30, 8)])
def test_candidate_blocks_equal_a_sort_of_block_maxima(num_blocks: int, block_size: int, device: str) -> None:
    batch = Batch(LENGTHS, ROWS, device, exact=True)
    got = topk_candidate_blocks(*batch.args(), num_blocks, block_size)
    assert got.dtype == torch.int32
    assert got.tolist() == [best_blocks(batch.scores(row), num_blocks, block_size) for row in range(len(ROWS))]


@pytest.mark.parametrize("topk", [16, 200])
@pytest.mark.parametrize("num_blocks", [4, 9, 30])
def test_both_at_once_equal_one_after_the_other(num_blocks: int, topk: int, device: str) -> None:
    args = Batch(LENGTHS, ROWS, device, exact=False).args()
    entries, blocks = index_topk_with_candidates(*args, topk, num_blocks, 8)
    assert torch.equal(entries, index_topk(*args, topk, None, 8))
    assert torch.equal(blocks, topk_candidate_blocks(*args, num_blocks, 8))


@pytest.mark.parametrize("block_size", [5, 8, 16])
@pytest.mark.parametrize("topk", [3, 16, 64])
def test_candidates_restrict_the_entries(topk: int, block_size: int, device: str) -> None:
    batch = Batch(LENGTHS, ROWS, device, exact=True)
    args = batch.args()
    blocks = topk_candidate_blocks(*args, 4, block_size)
    other = Batch(LENGTHS, ROWS, device, exact=True)
    other.keys = batch.keys
    got = index_topk(other.query, other.weights, *args[2:], topk, blocks, block_size)
    for row, listed in enumerate(blocks.tolist()):
        inside = {j: score for j, score in enumerate(other.scores(row)) if j // block_size in listed}
        assert got[row].tolist() == best(inside, topk)


def test_candidates_that_hold_everything_change_nothing(device: str) -> None:
    args = Batch(LENGTHS, ROWS, device, exact=False).args()
    blocks = topk_candidate_blocks(*args, 25, 8)  # 200 entries
    assert torch.equal(index_topk(*args, 16, blocks, 8), index_topk(*args, 16, None, 8))


def test_blocks_past_the_visible_entries_are_no_candidates(device: str) -> None:
    batch = Batch([40], [(0, 12), (0, 40)], device, exact=True)
    blocks = torch.tensor([[1, 3, 900], [-1, -1, -1]], dtype=torch.int32, device=device)
    got = index_topk(*batch.args(), 6, blocks, 8)
    assert got.tolist() == [[8, 9, 10, 11, -1, -1], [-1] * 6]


@pytest.mark.parametrize("heads, head_dim", [(1, 16), (3, 32), (32, 128)])
def test_normal_scores_choose_the_highest_up_to_rounding(heads: int, head_dim: int, device: str) -> None:
    batch = Batch(LENGTHS, ROWS, device, exact=False, heads=heads, head_dim=head_dim)
    for row, chosen in enumerate(index_topk(*batch.args(), 16, None, 8).tolist()):
        scores = torch.tensor(batch.scores(row), dtype=torch.float64)
        count = min(16, scores.numel())
        assert len(set(chosen[:count])) == count and chosen[count:] == [-1] * (16 - count)
        lowest = scores.topk(count).values[-1:]
        # a score is a sum of heads * head_dim products of about 1, each rounded: 2**-24 * 4096 at most
        assert (scores[chosen[:count]] >= lowest - 2.5e-4).all()


def test_the_relu_is_inside_and_weights_may_be_negative(device: str) -> None:
    # products (3, -5), (-1, 2), (0, 0), (1, 1), weights (1, -2): scores 3, -4, 0, -1
    keys = torch.tensor([[3.0, -5.0], [-1.0, 2.0], [0.0, 0.0], [1.0, 1.0]], device=device)
    query, weights = torch.eye(2, device=device).unsqueeze(0), torch.tensor([[1.0, -2.0]], device=device)
    args = query, weights, paged([keys], [0]), torch.tensor([4], device=device)
    assert [index_topk(*args, count, None, 8)[0].tolist() for count in (1, 2, 3)] == [[0], [0, 2], [0, 2, 3]]


def test_ties_go_to_the_lower_index_and_zeros_have_no_sign(device: str) -> None:
    keys = torch.zeros(100, 2, device=device)
    keys[50:, 0] = -1.0
    query = torch.tensor([[[1.0, 0.0]]], device=device)
    for weight in (1.0, -1.0):  # -1: the scores are -0.0
        args = query, torch.tensor([[weight]], device=device), paged([keys], [0]), torch.tensor([100], device=device)
        assert index_topk(*args, 5, None, 8).tolist() == [[0, 1, 2, 3, 4]]
        assert topk_candidate_blocks(*args, 3, 8).tolist() == [[0, 1, 12]]
    assert reference._highest(torch.tensor([[-0.0, 0.0, -0.0, -1.0, 0.0]], device=device), 3).tolist() == [[0, 1, 2]]


def test_the_newest_block_is_kept_and_infinite_scores_do_not_displace_it(device: str) -> None:
    keys = torch.ones(33, 1, device=device)
    keys[:32] = 3e38
    args = torch.full((1, 1, 1), 3.0, device=device), torch.ones(1, 1, device=device), paged([keys], [0])
    assert topk_candidate_blocks(*args, torch.tensor([33], device=device), 2, 8).tolist() == [[0, 4]]


def test_padding_rows_choose_nothing_and_read_nothing(device: str) -> None:
    pages = Pages(
        torch.full((2, SIZE, 8), float("nan"), device=device),
        torch.full((1, 1), 7, dtype=torch.int32, device=device),
        torch.zeros(3, dtype=torch.int64, device=device),
    )
    query, weights = torch.full((3, 2, 8), float("nan"), device=device), torch.ones(3, 2, device=device)
    args = query, weights, pages, torch.zeros(3, dtype=torch.int64, device=device)
    assert (index_topk(*args, 4, None, 8) == -1).all()
    blocks = topk_candidate_blocks(*args, 2, 8)
    assert (blocks == -1).all()
    assert (index_topk(*args, 4, blocks, 8) == -1).all()


def test_a_padding_row_full_of_nan_disturbs_no_other(device: str) -> None:
    batch = Batch(LENGTHS, ROWS, device, exact=True)
    want = index_topk(*batch.args(), 16, None, 8)
    padding = ROWS.index((0, 0))
    batch.query[padding] = float("nan")
    assert torch.equal(index_topk(*batch.args(), 16, None, 8), want)


def test_takes_no_rows(device: str) -> None:
    args = Batch([20], [(0, 3)], device, exact=True).args(rows=[])
    entries, blocks = index_topk_with_candidates(*args, 4, 2, 8)
    assert entries.shape == (0, 4) and blocks.shape == (0, 2)
    assert index_topk(*args, 4, blocks, 8).shape == (0, 4)


def test_takes_strided_queries_and_weights(device: str) -> None:
    query, weights, pages, num_visible = Batch(LENGTHS, ROWS, device, exact=False).args()
    wide = torch.cat((query, query), dim=2)[:, :, :32], torch.stack((weights, weights), dim=2)[:, :, 0]
    want = index_topk(query, weights, pages, num_visible, 16, None, 8)
    assert torch.equal(index_topk(*wide, pages, num_visible, 16, None, 8), want)


@pytest.mark.parametrize("heads, head_dim", [(1, 16), (4, 64), (8, 32), (32, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, heads: int, head_dim: int, device: str) -> None:
    if device != "cpu":
        pytest.skip("a property of the definition on CPU, where it is what runs")
    batch = Batch(LENGTHS, ROWS, device, exact=False, heads=heads, head_dim=head_dim).to(dtype)
    whole = whole_scores(batch, list(range(len(ROWS))), 0)
    shuffled = torch.randperm(len(ROWS)).tolist()
    subsets = [[row] for row in range(0, len(ROWS), 5)] + [
        [48],
        list(range(40)),
        list(range(5, 23)),
        [41, 42, 43, 44, 47],
    ]
    for _ in each_thread_count():
        for spare_columns, rows in [(0, shuffled), (3, shuffled[:20]), *((7, rows) for rows in subsets)]:
            for row, scores in whole_scores(batch, rows, spare_columns).items():
                assert torch.equal(scores, whole[row])


def whole_scores(batch: Batch, rows: list[int], spare_columns: int) -> dict[int, torch.Tensor]:
    """The reference's scores of each row's visible entries."""
    found = {}
    for chunk, scores in reference._score(*batch.args(rows, spare_columns)):
        for row, row_scores in zip(torch.tensor(rows, device=scores.device)[chunk].tolist(), scores, strict=True):
            visible = int(batch.num_visible[row])
            assert (row_scores[visible:] == float("-inf")).all()
            found[row] = row_scores[:visible]
    assert found.keys() == set(rows)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_records_choose_what_their_decoded_keys_choose(dtype: torch.dtype, device: str) -> None:
    """A decoded record is exact in bf16, so packed and plain caches hold the same keys."""
    batch = Batch(LENGTHS, ROWS, device, exact=False, heads=8, head_dim=64).to(dtype)
    records = [Record.FP4_INDEX.encode(keys) for keys in batch.keys]
    batch.keys = [Record.FP4_INDEX.decode(keys).to(dtype) for keys in records]
    packed = paged(records, batch.request_ids, record=Record.FP4_INDEX)
    args = batch.args()
    got = index_topk_with_candidates(args[0], args[1], packed, args[3], 16, 9, 8)
    for chosen, want in zip(got, index_topk_with_candidates(*args, 16, 9, 8), strict=True):
        assert torch.equal(chosen, want)


@pytest.mark.parametrize("chunk_bytes", [1, 100_000])
def test_small_chunks_choose_the_same(chunk_bytes: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = Batch(LENGTHS, ROWS, device, exact=False).args()
    want = index_topk_with_candidates(*args, 16, 9, 8)
    restricted = index_topk(*args, 16, want[1], 8)
    monkeypatch.setattr(reference, "CHUNK_BYTES", chunk_bytes)
    got = index_topk_with_candidates(*args, 16, 9, 8)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert torch.equal(index_topk(*args, 16, want[1], 8), restricted)


@pytest.mark.parametrize("request_ids", [[0], [0] * 16, [0] * 17, [3, 1, 2], [0, 0, 1] + [2] * 40 + [0]])
def test_row_tiles_hold_every_row_and_one_request_each(request_ids: list[int], device: str) -> None:
    ids = torch.tensor(request_ids, device=device)
    tiles = reference._row_tiles(ids)
    assert sorted(set(tiles.flatten().tolist())) == list(range(len(request_ids)))
    assert tiles.shape[1] <= 16
    assert (ids[tiles] == ids[tiles[:, :1]]).all()


def test_refuses(device: str) -> None:
    query, weights, pages, num_visible = Batch(LENGTHS, ROWS, device, exact=True).args()
    blocks = torch.zeros(len(ROWS), 2, dtype=torch.int32, device=device)
    for bad in (
        (query[0], weights, pages, num_visible, 4, None, 8),
        (query, weights[:, :2], pages, num_visible, 4, None, 8),
        (query[:, :, :16], weights, pages, num_visible, 4, None, 8),
        (query, weights, pages, num_visible[:3], 4, None, 8),
        (query[:3], weights[:3], pages, num_visible[:3], 4, None, 8),
        (query, weights, pages, num_visible, 0, None, 8),
        (query, weights, pages, num_visible, 4, blocks, 0),
        (query, weights, pages, num_visible, 4, blocks[:3], 8),
    ):
        with pytest.raises(ValueError, match="index_topk: "):
            index_topk(*bad)
    with pytest.raises(ValueError, match="topk_candidate_blocks: num_blocks must be positive, got 0"):
        topk_candidate_blocks(query, weights, pages, num_visible, 0, 8)
    with pytest.raises(ValueError, match="index_topk_with_candidates: block_size must be positive, got -1"):
        index_topk_with_candidates(query, weights, pages, num_visible, 4, 4, -1)
