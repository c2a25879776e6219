"""The definitions of `index_topk` and its two relatives: what every other module of this folder must equal.

Scores are products of one row's heads with KEY_TILE keys, whatever the batch: a row's bits depend on no other row.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn.functional import pad

from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.row_gemm import batch_gemm, batch_gemm_nt

KEY_TILE = 64  # keys of one product
ROW_TILE = 16  # rows of one request that share a gather of keys
CHUNK_BYTES = 64 << 20  # fp32 keys and scores at once, as far as one row tile fits in

LARGEST_BF16 = torch.finfo(torch.bfloat16).max
NO_SCORE = float("-inf")
NO_SCORE_RANK = -0x7F800000 << 32  # every rank of a score > -inf is at least this


def index_topk(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    keys: Pages,
    num_visible: torch.Tensor,
    topk: int,
    candidate_blocks: torch.Tensor | None,
    candidate_block_size: int,
) -> torch.Tensor:
    if query.shape[0] == 0 or (candidate_blocks is None and int(num_visible.max()) <= topk):
        return _first(num_visible, topk)
    out = query.new_empty(query.shape[0], topk, dtype=torch.int32)
    for rows, scores in _score(query, head_weights, keys, num_visible):
        if candidate_blocks is not None:
            _keep_blocks(scores, candidate_blocks[rows], candidate_block_size)
        out[rows] = _highest(scores, topk)
    return out


def topk_candidate_blocks(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    keys: Pages,
    num_visible: torch.Tensor,
    num_blocks: int,
    block_size: int,
) -> torch.Tensor:
    if query.shape[0] == 0 or int(num_visible.max()) <= num_blocks * block_size:
        return _first((num_visible + block_size - 1) // block_size, num_blocks)
    out = query.new_empty(query.shape[0], num_blocks, dtype=torch.int32)
    for rows, scores in _score(query, head_weights, keys, num_visible):
        out[rows] = _highest(_block_scores(scores, num_visible[rows], block_size), num_blocks)
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
    num_tokens, longest = query.shape[0], int(num_visible.max()) if query.shape[0] else 0
    if longest <= num_candidate_blocks * candidate_block_size:
        blocks = _first((num_visible + candidate_block_size - 1) // candidate_block_size, num_candidate_blocks)
        return index_topk(query, head_weights, keys, num_visible, topk, None, candidate_block_size), blocks
    entries = query.new_empty(num_tokens, topk, dtype=torch.int32)
    blocks = query.new_empty(num_tokens, num_candidate_blocks, dtype=torch.int32)
    for rows, scores in _score(query, head_weights, keys, num_visible):
        entries[rows] = _highest(scores, topk)
        block_scores = _block_scores(scores, num_visible[rows], candidate_block_size)
        blocks[rows] = _highest(block_scores, num_candidate_blocks)
    return entries, blocks


def _score(
    query: torch.Tensor, head_weights: torch.Tensor, keys: Pages, num_visible: torch.Tensor
) -> Iterator[tuple[torch.Tensor | slice, torch.Tensor]]:
    """Yield (rows, scores [num_rows, n] fp32, -inf behind the visible entries); a row may come twice, scored alike."""
    head_dim = query.shape[2]
    row_tiles = _row_tiles(keys.request_ids)
    num_lanes = row_tiles.shape[1]
    key_bytes = 4 * (head_dim + query.shape[1] + num_lanes)
    chunk = max(1, CHUNK_BYTES // (key_bytes * (int(num_visible.max()) + KEY_TILE)))
    for start in range(0, row_tiles.shape[0], chunk):
        rows = row_tiles[start : start + chunk]
        # tiles of one row are the rows themselves, and need no index
        lanes = rows.unbind(1) if num_lanes > 1 else (slice(start, start + chunk),)
        visible = num_visible[rows]  # [tiles, lanes]
        longest = visible.amax(1, keepdim=True)
        key_tiles = max(1, -(-int(longest.max()) // KEY_TILE))
        states = torch.arange(key_tiles * KEY_TILE, device=query.device)
        tile_pages = replace(keys, request_ids=keys.request_ids[lanes[0]])
        tile_keys = tile_pages.gather_states(torch.where(states < longest, states, -1)).float()
        tile_keys = tile_keys.view(-1, KEY_TILE, head_dim)  # of every key tile of every row tile
        scores = torch.stack([_products(query[lane], head_weights[lane], tile_keys) for lane in lanes], dim=1)
        scores.masked_fill_(states >= visible.unsqueeze(2), NO_SCORE)  # [tiles, lanes, key_tiles * KEY_TILE]
        yield rows.flatten() if num_lanes > 1 else lanes[0], scores.flatten(0, 1)


def _products(query: torch.Tensor, head_weights: torch.Tensor, tile_keys: torch.Tensor) -> torch.Tensor:
    """[n, h, d], [n, h] and [n * key_tiles, KEY_TILE, d] -> [n, key_tiles * KEY_TILE]."""
    key_tiles = tile_keys.shape[0] // query.shape[0]
    query = _repeat(query.float(), key_tiles)
    head_weights = _repeat(head_weights.float().unsqueeze(1), key_tiles)
    return batch_gemm(head_weights, batch_gemm_nt(query, tile_keys).relu_()).view(-1, key_tiles * KEY_TILE)


def _row_tiles(request_ids: torch.Tensor) -> torch.Tensor:
    """Row numbers [tiles, lanes <= ROW_TILE], a tile's rows of one request; a short tile repeats its first row."""
    rows = torch.arange(request_ids.shape[0], device=request_ids.device)
    _, runs, lengths = request_ids.unique_consecutive(return_inverse=True, return_counts=True)
    if lengths.shape == rows.shape:
        return rows.unsqueeze(1)
    rank_in_run = rows - (lengths.cumsum(0) - lengths)[runs]
    first = rows[rank_in_run % ROW_TILE == 0]
    end = torch.cat((first[1:], rows[-1:] + 1)).unsqueeze(1)
    first = first.unsqueeze(1)
    tiles = first + rows[: min(ROW_TILE, int(lengths.max()))]
    return torch.where(tiles < end, tiles, first)


def _repeat(items: torch.Tensor, times: int) -> torch.Tensor:
    """[n, a, b] -> [n * times, a, b], each item `times` times in a row."""
    return items.unsqueeze(1).expand(-1, times, -1, -1).flatten(0, 1)


def _block_scores(scores: torch.Tensor, num_visible: torch.Tensor, block_size: int) -> torch.Tensor:
    scores = pad(scores, (0, -scores.shape[1] % block_size), value=NO_SCORE)
    blocks = scores.unflatten(1, (-1, block_size)).amax(2).clamp_(max=LARGEST_BF16)
    newest = ((num_visible - 1) // block_size).unsqueeze(1)  # -1 where nothing is visible: no block
    return blocks.masked_fill_(torch.arange(blocks.shape[1], device=blocks.device) == newest, float("inf"))


def _keep_blocks(scores: torch.Tensor, candidate_blocks: torch.Tensor, block_size: int) -> None:
    """Overwrite with -inf what lies in no candidate block."""
    num_blocks = -(-scores.shape[1] // block_size)
    outside = scores.new_ones(scores.shape[0], num_blocks + 1, dtype=torch.bool)
    # the last column takes what names no block of these scores: -1, or blocks past this chunk's longest row
    blocks = candidate_blocks.long()
    blocks = torch.where((blocks >= 0) & (blocks < num_blocks), blocks, num_blocks)
    outside.scatter_(1, blocks, False)
    scores.masked_fill_(outside.repeat_interleave(block_size, 1)[:, : scores.shape[1]], NO_SCORE)


def _first(counts: torch.Tensor, width: int) -> torch.Tensor:
    """0 .. count - 1 in each row, then -1."""
    columns = torch.arange(width, dtype=torch.int32, device=counts.device)
    return torch.where(columns < counts.unsqueeze(1), columns, -1)


def _highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """[r, n] -> [r, count]: ascending indices of the highest scores, ties to the lower index; -1 for scores of -inf."""
    num_scores = scores.shape[1]
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # integers in the order of the floats
    ranks = bits.long() << 32  # the low half: the index, so that no two ranks are equal and topk has no choice
    ranks += torch.arange(num_scores - 1, -1, -1, device=scores.device)
    ranks, indices = ranks.topk(min(count, num_scores), dim=1, sorted=False)
    indices = indices.masked_fill_(ranks < NO_SCORE_RANK, num_scores).sort(dim=1).values
    indices = indices.masked_fill_(indices == num_scores, -1).int()
    return indices if count <= num_scores else pad(indices, (0, count - num_scores), value=-1)
