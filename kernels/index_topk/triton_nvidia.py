"""The indexer's ops in Triton: scores of a row's entries, then a radix selection of the highest, which sorts nothing.

Scores stand at *places*: an entry's own number, or, inside candidate blocks, its place among the candidates. Sizes on
the host come from the block table's shape: nothing waits for the device.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.triton_launch import chained, follow
from deepinfer_plugin.kernels.triton_records import load_rows

KEYS = 64  # entries of a program
SELECT_BLOCK = 1024  # places of a step of the selection
MAX_SCORE_BYTES = 256 << 20  # scores kept at once
LARGEST_BF16 = tl.constexpr(torch.finfo(torch.bfloat16).max)


def index_topk(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    keys: Pages,
    num_visible: torch.Tensor,
    topk: int,
    candidate_blocks: torch.Tensor | None,
    candidate_block_size: int,
) -> torch.Tensor:
    out = query.new_empty(query.shape[0], topk, dtype=torch.int32)
    for rows, scores in _scores(query, head_weights, keys, num_visible, candidate_blocks, candidate_block_size):
        candidates = None if candidate_blocks is None else candidate_blocks[rows]
        _select_highest(scores, num_visible[rows], out[rows], candidates, candidate_block_size)
    return out


def topk_candidate_blocks(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    keys: Pages,
    num_visible: torch.Tensor,
    num_blocks: int,
    block_size: int,
) -> torch.Tensor:
    out = query.new_empty(query.shape[0], num_blocks, dtype=torch.int32)
    for rows, scores in _scores(query, head_weights, keys, num_visible):
        _select_blocks(scores, num_visible[rows], out[rows], block_size)
    return out


def index_topk_with_candidates(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    keys: Pages,
    num_visible: torch.Tensor,
    topk: int,
    num_candidate_blocks: int,
    candidate_block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    entries = query.new_empty(query.shape[0], topk, dtype=torch.int32)
    blocks = query.new_empty(query.shape[0], num_candidate_blocks, dtype=torch.int32)
    for rows, scores in _scores(query, head_weights, keys, num_visible):
        _select_highest(scores, num_visible[rows], entries[rows])
        _select_blocks(scores, num_visible[rows], blocks[rows], candidate_block_size)
    return entries, blocks


def _scores(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    keys: Pages,
    num_visible: torch.Tensor,
    candidate_blocks: torch.Tensor | None = None,
    block_size: int = 1,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (rows, their scores [n, places], fp32; -inf where no entry may be chosen, anything behind the visible)."""
    query = query if query.stride(2) == 1 else query.contiguous()
    head_weights = head_weights if head_weights.stride(1) == 1 else head_weights.contiguous()
    cache = keys.cache if keys.cache.stride(2) == 1 else keys.cache.contiguous()
    num_tokens, num_heads, head_dim = query.shape
    places = keys.block_table.shape[1] * cache.shape[1]
    if candidate_blocks is not None:
        places = candidate_blocks.shape[1] * block_size
    chunk = max(1, MAX_SCORE_BYTES // (4 * places))
    for first in range(0, num_tokens, chunk):
        rows = slice(first, min(num_tokens, first + chunk))
        count = rows.stop - rows.start
        scores = torch.empty(count, places, dtype=torch.float32, device=query.device)
        _score[(count, triton.cdiv(places, KEYS))](
            *(query[rows], head_weights[rows], cache, keys.block_table, keys.request_ids[rows], num_visible[rows]),
            *(None if candidate_blocks is None else candidate_blocks[rows], scores, *query.stride()[:2]),
            *(head_weights.stride(0), cache.stride(0), cache.stride(1), keys.block_table.stride(0)),
            *(0 if candidate_blocks is None else candidate_blocks.stride(0), cache.shape[1], num_heads, places),
            BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim,
            HALF=max(16, triton.next_power_of_2(head_dim) // 2),
            HEADS=max(16, triton.next_power_of_2(num_heads)),
            RECORD=keys.record.value,
            EXACT=query.dtype == torch.bfloat16,
            KEYS=KEYS,
            num_warps=4,
            **chained(),
        )
        yield rows, scores


@triton.jit
def _score(
    query,
    head_weights,
    cache,
    table,
    request_ids,
    num_visible,
    candidates,
    scores,
    query_token,
    query_head,
    weight_token,
    cache_block,
    cache_state,
    table_row,
    candidate_row,
    states_per_block,
    num_heads,
    num_places,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    RECORD: tl.constexpr,
    EXACT: tl.constexpr,
    KEYS: tl.constexpr,
):
    follow()
    token = tl.program_id(0).to(tl.int64)
    visible = tl.load(num_visible + token)
    place = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    if candidates is None:
        if tl.program_id(1) * KEYS >= visible:
            return
        entry = place.to(tl.int64)
    else:
        if tl.program_id(1) * KEYS >= (visible + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE:
            return
        block = tl.load(candidates + token * candidate_row + place // BLOCK_SIZE, place < num_places, -1).to(tl.int64)
        entry = tl.where(block < 0, visible, block * BLOCK_SIZE + place % BLOCK_SIZE)
    present = (entry < visible) & (place < num_places)
    page = tl.load(table + tl.load(request_ids + token) * table_row + entry // states_per_block, present, 0)
    rows = page.to(tl.int64) * cache_block + entry % states_per_block * cache_state
    k_even, k_odd = load_rows(cache, rows, present, HEAD_DIM, HALF, RECORD)
    head, pair = tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (head < num_heads)[:, None] & (pair < HEAD_DIM // 2)[None, :]
    q = query + token * query_token + head[:, None] * query_head + 2 * pair[None, :]
    q_even, q_odd = tl.load(q, inside, 0.0), tl.load(q + 1, inside, 0.0)
    if EXACT:
        products = tl.dot(q_even, tl.trans(k_even.to(tl.bfloat16)))
        products = tl.dot(q_odd, tl.trans(k_odd.to(tl.bfloat16)), products)
    else:
        products = tl.dot(q_even.to(tl.float32), tl.trans(k_even.to(tl.float32)), input_precision="ieee")
        products = tl.dot(q_odd.to(tl.float32), tl.trans(k_odd.to(tl.float32)), products, input_precision="ieee")
    weight = tl.load(head_weights + token * weight_token + head, head < num_heads, 0.0).to(tl.float32)
    score = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0) + 0.0  # -0.0 becomes 0.0
    score = tl.where(present, score, -float("inf"))
    tl.store(scores + token * num_places + place, score, place < num_places)


def _select_blocks(scores: torch.Tensor, num_visible: torch.Tensor, out: torch.Tensor, block_size: int) -> None:
    num_rows, places = scores.shape
    blocks = triton.cdiv(places, block_size)
    block_scores = scores.new_empty(num_rows, blocks)
    if block_scores.numel():
        _score_blocks[(num_rows, triton.cdiv(blocks, KEYS))](
            *(scores, num_visible, block_scores, places, blocks, block_size, triton.next_power_of_2(block_size), KEYS),
            **chained(),
        )
    _select_highest(block_scores, torch.div(num_visible + block_size - 1, block_size, rounding_mode="floor"), out)


@triton.jit
def _score_blocks(
    scores,
    num_visible,
    block_scores,
    num_places,
    num_blocks,
    block_size,
    PADDED_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The highest visible score of each block, at most the largest bf16; infinite for the newest block."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    visible = tl.load(num_visible + row)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    if tl.program_id(1) * BLOCKS * block_size >= visible:
        return
    lane = tl.arange(0, PADDED_SIZE)[None, :]
    place = block[:, None] * block_size + lane
    score = tl.load(
        scores + row * num_places + place, (lane < block_size) & (place < visible) & (place < num_places), -float("inf")
    )
    highest = tl.minimum(tl.max(score, 1), LARGEST_BF16)
    highest = tl.where(block == (visible - 1) // block_size, float("inf"), highest)
    tl.store(block_scores + row * num_blocks + block, highest, block < num_blocks)


def _select_highest(
    scores: torch.Tensor,
    num_visible: torch.Tensor,
    out: torch.Tensor,
    candidate_blocks: torch.Tensor | None = None,
    block_size: int = 1,
) -> None:
    """Write the numbers of each row's highest scores into `out`, ascending, -1 at the end; ties to the lower place."""
    num_rows, places = scores.shape
    if not num_rows:
        return
    _select[(num_rows,)](
        *(scores, num_visible, candidate_blocks, out, 0 if candidate_blocks is None else candidate_blocks.stride(0)),
        *(places, out.shape[1]),
        BLOCK_SIZE=block_size,
        BLOCK=min(SELECT_BLOCK, max(128, triton.next_power_of_2(places))),
        num_warps=8,
        **chained(),
    )


@triton.jit
def _rank(score):
    """An unsigned number, in an int32, that stands in the order of the scores."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ (((bits >> 31) & 0x7FFFFFFF) | -0x80000000)


@triton.jit
def _select(
    scores,
    num_visible,
    candidates,
    out,
    candidate_row,
    num_places,
    count,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the rank that divides the chosen from the others, a byte at a time; then write what is above it."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    # candidate blocks ascend and have a visible entry each: places behind that many hold nothing
    visible = tl.load(num_visible + row)
    visible_places = (visible + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    places = tl.minimum(visible_places, num_places).to(tl.int32)
    scores += row * num_places
    digit_values = tl.arange(0, 256)
    threshold, wanted = 0, count
    searched = tl.where(places > count, places, 0)  # nothing to search for where all are chosen
    for byte in tl.static_range(4):
        shift = 24 - 8 * byte
        known = 0 if byte == 0 else -(256 << (24 - 8 * byte))  # the bytes above: the threshold's are known
        histogram = tl.zeros([256], tl.int32)
        for first in range(0, searched, BLOCK):
            place = first + tl.arange(0, BLOCK)
            score = tl.load(scores + place, place < places, -float("inf"))
            rank = _rank(score)
            counts = (score > -float("inf")) & ((rank & known) == threshold)
            histogram += tl.histogram((rank >> shift) & 255, 256, mask=counts)
        total = tl.sum(histogram)
        if byte == 0:
            wanted = tl.minimum(count, total)
        at_least = total - tl.cumsum(histogram, 0) + histogram
        digit = tl.max(tl.where(at_least >= wanted, digit_values, 0))
        wanted -= tl.sum(tl.where(digit_values > digit, histogram, 0))
        threshold = threshold | (digit << shift)
    threshold = tl.where(places > count, threshold, 0)
    written, equal_seen = 0, 0
    signed_threshold = threshold ^ -0x80000000
    for first in range(0, places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        score = tl.load(scores + place, place < places, -float("inf"))
        rank = _rank(score)
        chosen_from = score > -float("inf")
        equal = chosen_from & (rank == threshold)
        equal_rank = equal_seen + tl.cumsum(equal.to(tl.int32), 0)
        chosen = chosen_from & (((rank ^ -0x80000000) > signed_threshold) | (equal & (equal_rank <= wanted)))
        if candidates is None:
            entry = place
        else:
            block = tl.load(candidates + row * candidate_row + place // BLOCK_SIZE, chosen, 0)
            entry = block * BLOCK_SIZE + place % BLOCK_SIZE
        slot = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(out + row * count + slot, entry, chosen)
        written += tl.sum(chosen.to(tl.int32))
        equal_seen += tl.sum(equal.to(tl.int32))
    for first in range(0, count, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        tl.store(out + row * count + slot, -1, (slot >= written) & (slot < count))
