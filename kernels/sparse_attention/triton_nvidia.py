"""`sparse_attention` in Triton: a softmax per tile of keys, and the tiles merged in their order.

A tile's softmax is taken by itself, so that it does not matter who computes it: for few tokens every tile has a program
of its own and a second kernel merges, for many one program goes through a token's tiles. Both merge with the same
arithmetic, hence the same bits. The sink is where the merging starts: a first logit without a value.
"""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels import target
from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.triton_launch import chained, follow
from deepinfer_plugin.kernels.triton_records import load_rows

WIDE = 90  # compute capability whose tensor cores want 64 rows; SM100's too, but there the sums outgrow their memory
MAX_SPLIT_TOKENS = 32  # up to here tiles are computed side by side
MERGED_HEADS, MERGED = 4, 128  # heads and channels of a program that merges


def sparse_attention(
    query: torch.Tensor,
    window: Pages,
    positions: torch.Tensor,
    window_size: int,
    selected: Pages | None,
    selected_indices: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    aligned = query.stride(2) == 1 and not (query.stride(0) % 2 or query.stride(1) % 2 or query.storage_offset() % 2)
    query = query if aligned else query.contiguous()  # channels are read in pairs
    num_tokens, num_heads, head_dim = query.shape
    if head_dim % 2:
        raise NotImplementedError(f"sparse_attention: in Triton channels come in pairs, got {head_dim}")
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    wide = target.compute_capability() == WIDE
    heads = 64 if wide and num_heads > 32 else 16  # as many whatever the number of tokens: sums over keys depend on it
    keys = 64 if wide and query.dtype == torch.bfloat16 else 32  # fp32 keys take twice the room
    chosen = window if selected is None else selected  # something to point at
    indices = window.block_table[:, :0] if selected_indices is None else selected_indices
    window_tiles = triton.cdiv(window_size, keys)
    tiles = window_tiles + triton.cdiv(indices.shape[1], keys)
    # in fp32 the order of a sum follows the code around it, so that all tokens must run the same
    split = num_tokens <= MAX_SPLIT_TOKENS and query.dtype == torch.bfloat16
    options = {"dtype": torch.float32, "device": query.device}
    sums = torch.empty(num_tokens, tiles, num_heads, head_dim, **options) if split else out
    states = torch.empty(num_tokens, tiles, 2, num_heads, **options) if split else out
    _sparse_attention[(num_tokens, triton.cdiv(num_heads, heads), tiles if split else 1)](
        *(query, *_table(window), *_table(chosen), positions, indices, sink, out, sums, states),
        *(query.stride(0), query.stride(1), indices.stride(0)),
        *(num_heads, window_size, indices.shape[1], window_tiles, tiles, scale, head_dim),
        HALF=max(16, triton.next_power_of_2(head_dim) // 2),
        WINDOW_STATES=window.cache.shape[1],
        SELECTED_STATES=chosen.cache.shape[1],
        WINDOW_RECORD=window.record.value,
        SELECTED_RECORD=chosen.record.value,
        EXACT=query.dtype == torch.bfloat16,
        SPLIT=split,
        HEADS=heads,
        KEYS=keys,
        num_warps=8 if wide else 4,
        num_stages=1,
        **chained(),
    )
    if split:
        _merge[(num_tokens, triton.cdiv(num_heads, MERGED_HEADS), triton.cdiv(head_dim, MERGED))](
            *(sums, states, sink, out, num_heads, tiles, head_dim),
            HEADS=MERGED_HEADS,
            CHANNELS=MERGED,
            num_warps=4,
            **chained(),
        )
    return out


def _table(pages: Pages) -> tuple[torch.Tensor | int, ...]:
    cache, table = pages.cache, pages.block_table
    cache = cache if cache.stride(2) == 1 else cache.contiguous()
    return cache, table, pages.request_ids, cache.stride(0), cache.stride(1), table.stride(0)


@triton.jit
def _sparse_attention(
    query,
    window,
    window_table,
    window_requests,
    window_block,
    window_state,
    window_row,
    selected,
    selected_table,
    selected_requests,
    selected_block,
    selected_state,
    selected_row,
    positions,
    selected_indices,
    sink,
    out,
    sums,
    states,
    query_token,
    query_head,
    index_token,
    num_heads,
    window_size,
    num_selected,
    window_tiles,
    num_tiles,
    scale,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    WINDOW_STATES: tl.constexpr,
    SELECTED_STATES: tl.constexpr,
    WINDOW_RECORD: tl.constexpr,
    SELECTED_RECORD: tl.constexpr,
    EXACT: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """SPLIT: one tile a program, its softmax to `sums` and `states`; otherwise all of them, merged into `out`.

    _STATES: of a block; a constant, because divisions by it are many.
    """
    follow()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    inside = (head < num_heads)[:, None] & (pair < HEAD_DIM // 2)[None, :]
    q = query + token * query_token + head[:, None] * query_head
    if EXACT:  # two channels at once
        both = tl.load(q.to(tl.pointer_type(tl.int32)) + pair[None, :], inside, 0)
        q_even = (both & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        q_odd = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        q += 2 * pair[None, :]
        q_even, q_odd = tl.load(q, inside, 0.0), tl.load(q + 1, inside, 0.0)
    position = tl.load(positions + token).to(tl.int32)
    window_row_table = window_table + tl.load(window_requests + token) * window_row
    selected_row_table = selected_table + tl.load(selected_requests + token) * selected_row
    ONE_RECORD: tl.constexpr = WINDOW_RECORD == SELECTED_RECORD
    if SPLIT:
        tile = tl.program_id(2)
        place = tile * KEYS + tl.arange(0, KEYS)
        newest = position - window_size + 1 + place
        if tile < window_tiles:
            state = tl.where(place < window_size, newest, -1)
            rows, present = _find(window_row_table, state, WINDOW_STATES, window_block, window_state)
            k_even, k_odd = load_rows(window, rows, present, HEAD_DIM, HALF, WINDOW_RECORD)
        else:
            place -= window_tiles * KEYS
            state = tl.load(selected_indices + token * index_token + place, place < num_selected, -1)
            rows, present = _find(selected_row_table, state, SELECTED_STATES, selected_block, selected_state)
            k_even, k_odd = load_rows(selected, rows, present, HEAD_DIM, HALF, SELECTED_RECORD)
        weights, highest, total = _softmax(q_even, q_odd, k_even, k_odd, present, scale, EXACT)
        row = (token * num_tiles + tile) * num_heads + head
        result = sums + row[:, None] * HEAD_DIM + pair[None, :]  # the even channels first
        tl.store(result, _dot(weights, k_even, None, EXACT), inside)
        tl.store(result + HEAD_DIM // 2, _dot(weights, k_odd, None, EXACT), inside)
        place_of_state = states + (token * num_tiles + tile) * 2 * num_heads + head
        tl.store(place_of_state, highest, head < num_heads)
        tl.store(place_of_state + num_heads, total, head < num_heads)
    else:
        highest = tl.load(sink + head, head < num_heads, 0.0)
        denominator = tl.full([HEADS], 1.0, tl.float32)
        even, odd = tl.zeros([HEADS, HALF], tl.float32), tl.zeros([HEADS, HALF], tl.float32)
        for tile in range(num_tiles if ONE_RECORD else window_tiles):  # a second loop costs registers
            in_window = tile < window_tiles
            place = tl.where(in_window, tile, tile - window_tiles) * KEYS + tl.arange(0, KEYS)
            state = tl.load(
                selected_indices + token * index_token + place, (not in_window) & (place < num_selected), -1
            )
            newest = position - window_size + 1 + place
            state = tl.where(in_window, tl.where(place < window_size, newest, -1), state)
            cache = tl.where(in_window, window, selected)
            table = tl.where(in_window, window_row_table, selected_row_table)
            block_stride = tl.where(in_window, window_block, selected_block)
            state_stride = tl.where(in_window, window_state, selected_state)
            if WINDOW_STATES == SELECTED_STATES:
                rows, present = _find(table, state, WINDOW_STATES, block_stride, state_stride)
            else:
                size = tl.where(in_window, WINDOW_STATES, SELECTED_STATES)
                rows, present = _find(table, state, size, block_stride, state_stride)
            k_even, k_odd = load_rows(cache, rows, present, HEAD_DIM, HALF, WINDOW_RECORD)
            weights, tile_highest, tile_total = _softmax(q_even, q_odd, k_even, k_odd, present, scale, EXACT)
            new_highest, old_share, tile_share = _shares(highest, tile_highest)
            denominator = tl.fma(denominator, old_share, tile_total * tile_share)
            highest = new_highest
            even = _merged(even, _dot(weights, k_even, None, EXACT), old_share, tile_share)
            odd = _merged(odd, _dot(weights, k_odd, None, EXACT), old_share, tile_share)
        if not ONE_RECORD:
            for tile in range(window_tiles, num_tiles):
                place = (tile - window_tiles) * KEYS + tl.arange(0, KEYS)
                state = tl.load(selected_indices + token * index_token + place, place < num_selected, -1)
                rows, present = _find(selected_row_table, state, SELECTED_STATES, selected_block, selected_state)
                k_even, k_odd = load_rows(selected, rows, present, HEAD_DIM, HALF, SELECTED_RECORD)
                weights, tile_highest, tile_total = _softmax(q_even, q_odd, k_even, k_odd, present, scale, EXACT)
                new_highest, old_share, tile_share = _shares(highest, tile_highest)
                denominator = tl.fma(denominator, old_share, tile_total * tile_share)
                highest = new_highest
                even = _merged(even, _dot(weights, k_even, None, EXACT), old_share, tile_share)
                odd = _merged(odd, _dot(weights, k_odd, None, EXACT), old_share, tile_share)
        result = out + (token * num_heads + head[:, None]) * HEAD_DIM
        even, odd = even / denominator[:, None], odd / denominator[:, None]
        if EXACT:
            low = even.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            high = odd.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
            tl.store(result.to(tl.pointer_type(tl.int32)) + pair[None, :], low | high, inside)
        else:
            result += 2 * pair[None, :]
            tl.store(result, even.to(out.dtype.element_ty), inside)
            tl.store(result + 1, odd.to(out.dtype.element_ty), inside)


@triton.jit
def _find(table, states, states_per_block, block_stride, state_stride):
    """Element offsets of a request's states in its cache, and which of them are there (not negative)."""
    present = states >= 0
    block = tl.load(table + states // states_per_block, present, 0).to(tl.int64)
    return block * block_stride + states % states_per_block * state_stride, present


@triton.jit
def _softmax(q_even, q_odd, k_even, k_odd, present, scale, EXACT: tl.constexpr):
    """(weights [heads, keys], the highest logit, the sum of the weights) of one tile; -inf and 0 where it is empty.

    Keys are values too, and come as their even and their odd channels.
    """
    logits = _dot(q_even, tl.trans(k_even), None, EXACT)
    logits = _dot(q_odd, tl.trans(k_odd), logits, EXACT) * scale
    logits = tl.where(present[None, :], logits, -float("inf"))
    highest = tl.max(logits, 1)
    weights = tl.exp(logits - tl.where(highest == -float("inf"), 0.0, highest)[:, None])
    return weights, highest, tl.sum(weights, 1)


@triton.jit
def _shares(highest, tile_highest):
    """(the highest logit of both, and what the weights of each are worth beside it)."""
    new_highest = tl.maximum(highest, tile_highest)
    return new_highest, tl.exp(highest - new_highest), tl.exp(tile_highest - new_highest)


@triton.jit
def _merged(values, tile_values, old_share, tile_share):
    """A named rounding for every step: the compiler may not choose another in another kernel."""
    return tl.fma(values, tl.broadcast_to(old_share[:, None], values.shape), tile_values * tile_share[:, None])


@triton.jit
def _merge(
    sums,
    states,
    sink,
    out,
    num_heads,
    TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    follow()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = head < num_heads
    place = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)  # in the sums: the even channels first
    channel = tl.where(place < HEAD_DIM // 2, 2 * place, 2 * place - HEAD_DIM + 1)
    inside = there[:, None] & (place < HEAD_DIM)[None, :]
    highest = tl.load(sink + head, there, 0.0)
    denominator = tl.full([HEADS], 1.0, tl.float32)
    values = tl.zeros([HEADS, CHANNELS], tl.float32)
    for tile in tl.static_range(TILES):  # so that all are being loaded at once
        row = (token * TILES + tile) * num_heads + head
        tile_values = tl.load(sums + row[:, None] * HEAD_DIM + place[None, :], inside, 0.0)
        state = states + (token * TILES + tile) * 2 * num_heads + head
        highest, old_share, tile_share = _shares(highest, tl.load(state, there, 0.0))
        denominator = tl.fma(denominator, old_share, tl.load(state + num_heads, there, 0.0) * tile_share)
        values = _merged(values, tile_values, old_share, tile_share)
    result = (values / denominator[:, None]).to(out.dtype.element_ty)
    tl.store(out + (token * num_heads + head[:, None]) * HEAD_DIM + channel[None, :], result, inside)


@triton.jit
def _dot(a, b, total, EXACT: tl.constexpr):
    if EXACT:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
