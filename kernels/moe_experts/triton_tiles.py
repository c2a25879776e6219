"""`pairs_in_tiles` in one launch, for few pairs: every pair counts those before it that go to the same expert."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.moe_experts import tiles
from deepinfer_plugin.kernels.triton_launch import chained, follow

MAX_PAIRS = 1024
OTHERS = 32  # pairs that all are compared with at once


def pairs_in_tiles(
    expert_ids: torch.Tensor, expert_start: int, num_experts: int, tile_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `tiles.pairs_in_tiles` of ``expert_ids - expert_start``; a tile without pairs has no expert that can be read.

    expert_ids: [num_pairs], int64, contiguous.
    """
    num_pairs = expert_ids.numel()
    if num_pairs > MAX_PAIRS:
        return tiles.pairs_in_tiles(expert_ids - expert_start, num_experts, tile_size)
    num_tiles = tiles.most_tiles(num_pairs, num_experts, tile_size)
    pairs = expert_ids.new_empty(num_tiles * tile_size)
    experts = expert_ids.new_empty(num_tiles)
    _pairs_in_tiles[(1,)](
        *(expert_ids, pairs, experts, num_pairs, expert_start, num_experts, pairs.numel(), tile_size),
        PAIRS=triton.next_power_of_2(num_pairs),
        EXPERTS=triton.next_power_of_2(num_experts),
        OTHERS=OTHERS,
        num_warps=4,
        **chained(),
    )
    return pairs, experts


@triton.jit
def _pairs_in_tiles(
    expert_ids,
    tile_pairs,
    tile_experts,
    num_pairs,
    expert_start,
    num_experts,
    num_slots,
    tile_size,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    follow()
    for first in range(0, num_slots, PAIRS):
        slot = first + tl.arange(0, PAIRS)
        tl.store(tile_pairs + slot, num_pairs, slot < num_slots)
    pair = tl.arange(0, PAIRS)
    expert = (tl.load(expert_ids + pair, pair < num_pairs, -1) - expert_start).to(tl.int32)
    local = (pair < num_pairs) & (expert >= 0) & (expert < num_experts)
    rank = tl.zeros([PAIRS], tl.int32)
    for first in range(0, num_pairs, OTHERS):
        other = first + tl.arange(0, OTHERS)
        other_expert = (tl.load(expert_ids + other, other < num_pairs, -1) - expert_start).to(tl.int32)
        rank += tl.sum(((other_expert[None, :] == expert[:, None]) & (other[None, :] < pair[:, None])).to(tl.int32), 1)
    expert = tl.where(local, expert, 0)
    tiles = (tl.histogram(expert, EXPERTS, mask=local) + tile_size - 1) // tile_size
    starts = tl.cumsum(tiles, 0) - tiles
    every_expert = tl.arange(0, EXPERTS)
    for n in range(0, (num_pairs + tile_size - 1) // tile_size):
        tl.store(tile_experts + starts + n, every_expert.to(tl.int64), n < tiles)
    slot = (tl.gather(starts, expert, 0) + rank // tile_size) * tile_size + rank % tile_size
    tl.debug_barrier()  # the stores above come first
    tl.store(tile_pairs + slot, pair.to(tl.int64), local)
