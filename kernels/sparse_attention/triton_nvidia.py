"""`sparse_attention` in Triton: a program per token and up to 64 heads, over its keys in their order.

One kernel for prefill, decode and verification: a row's bits do not depend on what it is called for. The sink is where
the running softmax starts: a first logit without a value.
"""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels import target
from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.triton_records import load_rows

WIDE = 90  # compute capability whose tensor cores want 64 rows; SM100's too, but there the sums outgrow their memory
KEYS = 32  # of a step


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
    query = query if query.stride(2) == 1 else query.contiguous()
    num_tokens, num_heads, head_dim = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    most = 64 if target.compute_capability() == WIDE else 32
    heads = max(16, min(most, triton.next_power_of_2(num_heads)))
    chosen = window if selected is None else selected  # something to point at
    indices = window.block_table[:, :0] if selected_indices is None else selected_indices
    _sparse_attention[(num_tokens, triton.cdiv(num_heads, heads))](
        *(query, *_table(window), *_table(chosen), positions, indices, sink, out),
        *(query.stride(0), query.stride(1), indices.stride(0)),
        *(num_heads, window_size, indices.shape[1], scale, head_dim),
        HALF=max(16, triton.next_power_of_2(head_dim) // 2),
        WINDOW_RECORD=window.record.value,
        SELECTED_RECORD=chosen.record.value,
        EXACT=query.dtype == torch.bfloat16,
        HEADS=heads,
        KEYS=KEYS,
        num_warps=8,
        num_stages=2 if most == 64 else 1,
    )
    return out


def _table(pages: Pages) -> tuple[torch.Tensor | int, ...]:
    cache, table = pages.cache, pages.block_table
    cache = cache if cache.stride(2) == 1 else cache.contiguous()
    return cache, table, pages.request_ids, cache.stride(0), cache.stride(1), table.stride(0), cache.shape[1]


@triton.jit
def _sparse_attention(
    query,
    window,
    window_table,
    window_requests,
    window_block,
    window_state,
    window_row,
    window_size_of_block,
    selected,
    selected_table,
    selected_requests,
    selected_block,
    selected_state,
    selected_row,
    selected_size_of_block,
    positions,
    selected_indices,
    sink,
    out,
    query_token,
    query_head,
    index_token,
    num_heads,
    window_size,
    num_selected,
    scale,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    WINDOW_RECORD: tl.constexpr,
    SELECTED_RECORD: tl.constexpr,
    EXACT: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    inside = (head < num_heads)[:, None] & (2 * pair < HEAD_DIM)[None, :]
    q = query + token * query_token + head[:, None] * query_head + 2 * pair[None, :]
    q_even, q_odd = tl.load(q, inside, 0.0), tl.load(q + 1, inside, 0.0)
    position = tl.load(positions + token)
    highest = tl.load(sink + head, head < num_heads, 0.0)
    denominator = tl.full([HEADS], 1.0, tl.float32)
    even, odd = tl.zeros([HEADS, HALF], tl.float32), tl.zeros([HEADS, HALF], tl.float32)

    window_row_table = window_table + tl.load(window_requests + token) * window_row
    selected_row_table = selected_table + tl.load(selected_requests + token) * selected_row
    window_steps = tl.cdiv(window_size, KEYS)
    steps = window_steps + tl.cdiv(num_selected, KEYS)
    ONE_LOOP: tl.constexpr = WINDOW_RECORD == SELECTED_RECORD  # a second loop costs registers
    for step in range(steps if ONE_LOOP else window_steps):
        in_window = step < window_steps
        place = tl.where(in_window, step, step - window_steps) * KEYS + tl.arange(0, KEYS)
        state = tl.load(
            selected_indices + token * index_token + place, (not in_window) & (place < num_selected), -1
        ).to(tl.int64)
        newest = position - window_size + 1 + place
        state = tl.where(in_window, tl.where(place < window_size, newest, -1), state)
        cache = tl.where(in_window, window, selected)
        table = tl.where(in_window, window_row_table, selected_row_table)
        size = tl.where(in_window, window_size_of_block, selected_size_of_block)
        block_stride = tl.where(in_window, window_block, selected_block)
        state_stride = tl.where(in_window, window_state, selected_state)
        rows, present = _find(table, state, size, block_stride, state_stride)
        k_even, k_odd = load_rows(cache, rows, present, HEAD_DIM, HALF, WINDOW_RECORD)
        highest, denominator, even, odd = _attend(
            q_even, q_odd, k_even, k_odd, present, scale, highest, denominator, even, odd, EXACT
        )
    if not ONE_LOOP:
        for step in range(window_steps, steps):
            place = (step - window_steps) * KEYS + tl.arange(0, KEYS)
            state = tl.load(selected_indices + token * index_token + place, place < num_selected, -1).to(tl.int64)
            rows, present = _find(selected_row_table, state, selected_size_of_block, selected_block, selected_state)
            k_even, k_odd = load_rows(selected, rows, present, HEAD_DIM, HALF, SELECTED_RECORD)
            highest, denominator, even, odd = _attend(
                q_even, q_odd, k_even, k_odd, present, scale, highest, denominator, even, odd, EXACT
            )

    result = out + (token * num_heads + head[:, None]) * HEAD_DIM + 2 * pair[None, :]
    tl.store(result, (even / denominator[:, None]).to(out.dtype.element_ty), inside)
    tl.store(result + 1, (odd / denominator[:, None]).to(out.dtype.element_ty), inside)


@triton.jit
def _find(table, states, states_per_block, block_stride, state_stride):
    """Element offsets of a request's states in its cache, and which of them are there (not negative)."""
    present = states >= 0
    block = tl.load(table + states // states_per_block, present, 0).to(tl.int64)
    return block * block_stride + states % states_per_block * state_stride, present


@triton.jit
def _attend(q_even, q_odd, k_even, k_odd, present, scale, highest, denominator, even, odd, EXACT: tl.constexpr):
    """One step of the running softmax; keys are values too, and come as their even and their odd channels."""
    logits = _dot(q_even, tl.trans(k_even), None, EXACT)
    logits = _dot(q_odd, tl.trans(k_odd), logits, EXACT) * scale
    logits = tl.where(present[None, :], logits, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(logits, 1))
    shrink = tl.exp(highest - new_highest)
    weights = tl.exp(logits - new_highest[:, None])
    denominator = denominator * shrink + tl.sum(weights, 1)
    even = _dot(weights, k_even, even * shrink[:, None], EXACT)
    odd = _dot(weights, k_odd, odd * shrink[:, None], EXACT)
    return new_highest, denominator, even, odd


@triton.jit
def _dot(a, b, total, EXACT: tl.constexpr):
    if EXACT:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
