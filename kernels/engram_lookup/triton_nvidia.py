"""`engram_hash` and `engram_lookup` in Triton: a program per token, and per token and table row.

The table may lie in pinned host memory: the kernel reads each row once, wherever it is.
"""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_formats import e4m3_value, e8m0_value
from deepinfer_plugin.kernels.triton_launch import chained, follow


def engram_hash(
    class_ids: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    num_tokens, (orders, heads) = class_ids.shape[0], primes.shape
    out = torch.empty(num_tokens, orders * heads, dtype=torch.int64, device=class_ids.device)
    if num_tokens:
        _engram_hash[(num_tokens,)](
            *(class_ids.contiguous(), multipliers, primes.contiguous(), offsets, out, heads, orders),
            BLOCK=triton.next_power_of_2(heads),
            num_warps=1,
            **chained(),
        )
    return out


@triton.jit
def _engram_hash(class_ids, multipliers, primes, offsets, out, heads, ORDERS: tl.constexpr, BLOCK: tl.constexpr):
    follow()
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)
    inside = head < heads
    history = class_ids + token * (ORDERS + 1)
    roll = tl.load(history) * tl.load(multipliers)
    for order in tl.static_range(ORDERS):
        roll = roll ^ (tl.load(history + order + 1) * tl.load(multipliers + order + 1))
        prime = tl.load(primes + order * heads + head, inside, 1)
        offset = tl.load(offsets + order * heads + head, inside, 0)
        tl.store(out + (token * ORDERS + order) * heads + head, roll % prime + offset, inside)


def engram_lookup(rows: torch.Tensor, table: torch.Tensor, sf: torch.Tensor, row_start: int) -> torch.Tensor:
    (num_tokens, num_columns), (num_rows, head_dim) = rows.shape, table.shape
    out = torch.empty(num_tokens, num_columns * head_dim, dtype=torch.float32, device=rows.device)
    if out.numel():
        _engram_lookup[(num_tokens * num_columns,)](
            *(rows.contiguous(), table.view(torch.uint8), sf.view(torch.uint8), out, row_start, num_rows),
            *(*table.stride(), *sf.stride(), head_dim),
            BLOCK=triton.next_power_of_2(head_dim),
            num_warps=1,
            **chained(),
        )
    return out


@triton.jit
def _engram_lookup(
    rows,
    table,
    sf,
    out,
    row_start,
    num_rows,
    table_row,
    table_channel,
    sf_row,
    sf_group,
    head_dim,
    BLOCK: tl.constexpr,
):
    follow()
    index = tl.program_id(0).to(tl.int64)
    wanted = tl.load(rows + index)
    row = wanted - row_start
    channel = tl.arange(0, BLOCK)
    inside = channel < head_dim
    present = inside & (wanted >= 0) & (row >= 0) & (row < num_rows)
    values = e4m3_value(tl.load(table + row * table_row + channel * table_channel, present, 0))
    factors = e8m0_value(tl.load(sf + row * sf_row + channel // 32 * sf_group, present, 0))
    tl.store(out + index * head_dim + channel, tl.where(present, values * factors, 0.0), inside)
