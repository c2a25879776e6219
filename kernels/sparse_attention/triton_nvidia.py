"""`sparse_attention` in Triton: a program per token and 64 heads, over its keys in their order.

One kernel for prefill, decode and verification: a row's bits do not depend on what it is called for. The sink is where
the running softmax starts: a first logit without a value.
"""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.triton_records import load_rows

HEADS = 64  # of a program, at most
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
    heads = max(16, min(HEADS, triton.next_power_of_2(num_heads)))
    chosen = window if selected is None else selected  # something to point at
    num_selected = 0 if selected_indices is None else selected_indices.shape[1]
    _sparse_attention[(num_tokens, triton.cdiv(num_heads, heads))](
        *(query, *_table(window), *_table(chosen), positions, selected_indices, sink, out),
        *(query.stride(0), query.stride(1), 0 if selected_indices is None else selected_indices.stride(0)),
        *(num_heads, window_size, num_selected, scale, head_dim),
        WIDTH=max(16, triton.next_power_of_2(head_dim)),
        WINDOW_RECORD=window.record.value,
        SELECTED_RECORD=chosen.record.value,
        EXACT=query.dtype == torch.bfloat16,
        HEADS=heads,
        KEYS=KEYS,
        num_warps=8 if heads == 64 else 4,
        num_stages=2,
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
    WIDTH: tl.constexpr,
    WINDOW_RECORD: tl.constexpr,
    SELECTED_RECORD: tl.constexpr,
    EXACT: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, WIDTH)
    inside = (head < num_heads)[:, None] & (channel < HEAD_DIM)[None, :]
    q = tl.load(query + token * query_token + head[:, None] * query_head + channel[None, :], inside, 0.0)
    position = tl.load(positions + token)
    highest = tl.load(sink + head, head < num_heads, 0.0)
    denominator = tl.full([HEADS], 1.0, tl.float32)
    total = tl.zeros([HEADS, WIDTH], tl.float32)

    table = window_table + tl.load(window_requests + token) * window_row
    for first in range(0, window_size, KEYS):
        place = first + tl.arange(0, KEYS)
        state = position - window_size + 1 + place
        present = (place < window_size) & (state >= 0)
        block = tl.load(table + state // window_size_of_block, present, 0).to(tl.int64)
        rows = block * window_block + state % window_size_of_block * window_state
        keys = load_rows(window, rows, present, HEAD_DIM, WIDTH, WINDOW_RECORD)
        highest, denominator, total = _attend(q, keys, present, scale, highest, denominator, total, EXACT)

    table = selected_table + tl.load(selected_requests + token) * selected_row
    for first in range(0, num_selected, KEYS):
        place = first + tl.arange(0, KEYS)
        entry = tl.load(selected_indices + token * index_token + place, place < num_selected, -1)
        present = entry >= 0
        block = tl.load(table + entry // selected_size_of_block, present, 0).to(tl.int64)
        rows = block * selected_block + entry % selected_size_of_block * selected_state
        keys = load_rows(selected, rows, present, HEAD_DIM, WIDTH, SELECTED_RECORD)
        highest, denominator, total = _attend(q, keys, present, scale, highest, denominator, total, EXACT)

    result = (total / denominator[:, None]).to(out.dtype.element_ty)
    tl.store(out + (token * num_heads + head[:, None]) * HEAD_DIM + channel[None, :], result, inside)


@triton.jit
def _attend(q, keys, present, scale, highest, denominator, total, EXACT: tl.constexpr):
    """One step of the running softmax; keys are values too."""
    if EXACT:
        keys = keys.to(tl.bfloat16)
        logits = tl.dot(q, tl.trans(keys)) * scale
    else:
        keys = keys.to(tl.float32)
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    logits = tl.where(present[None, :], logits, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(logits, 1))
    shrink = tl.exp(highest - new_highest)
    weights = tl.exp(logits - new_highest[:, None])
    denominator = denominator * shrink + tl.sum(weights, 1)
    total = total * shrink[:, None]
    if EXACT:
        total = tl.dot(weights.to(tl.bfloat16), keys, total)
    else:
        total = tl.dot(weights, keys, total, input_precision="ieee")
    return new_highest, denominator, total
