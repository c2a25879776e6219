"""Pairs (token, expert) sorted by expert into tiles of rows, so that a product sees one expert's rows.

The number of tiles is bounded on the host: nothing waits for the device.
"""

import torch


def most_tiles(num_pairs: int, num_experts: int, tile_size: int) -> int:
    """Tiles that any choice of experts needs at most."""
    return min(num_pairs, num_pairs // tile_size + num_experts)


def slots_in_tiles(
    expert_ids: torch.Tensor, is_local: torch.Tensor, num_experts: int, tile_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give every pair a row of a tile of its expert.

    Args:
        expert_ids: [num_pairs], int64; in [0, num_experts) where local.
        is_local: [num_pairs], bool.

    Returns:
        The slot of each pair (tile * tile_size + row; one past the last tile for pairs that are not local) and the
        expert of each tile (arbitrary for tiles without rows).
    """
    num_pairs, device = len(expert_ids), expert_ids.device
    num_tiles = most_tiles(num_pairs, num_experts, tile_size)
    group = torch.where(is_local, expert_ids, num_experts)  # the last group collects what is not ours
    sorted_group, order = group.sort(stable=True)
    starts = torch.searchsorted(sorted_group, torch.arange(num_experts + 2, device=device))
    tile_ends = ((starts.diff() + tile_size - 1) // tile_size)[:num_experts].cumsum(0)
    tile_experts = torch.searchsorted(tile_ends, torch.arange(num_tiles, device=device), right=True)
    first_slots = torch.cat([tile_ends.new_zeros(1), tile_ends]) * tile_size  # [num_experts + 1]
    sorted_slots = (first_slots - starts[:-1])[sorted_group] + torch.arange(num_pairs, device=device)
    sorted_slots.masked_fill_(sorted_group == num_experts, num_tiles * tile_size)
    slots = torch.empty_like(order).index_copy_(0, order, sorted_slots)
    return slots, tile_experts.clamp_(max=num_experts - 1)


def pairs_in_tiles(expert_ids: torch.Tensor, num_experts: int, tile_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair in every row of every tile, num_pairs for none, [num_tiles * tile_size]; and the expert of each tile."""
    is_local = (expert_ids >= 0) & (expert_ids < num_experts)
    slots, tile_experts = slots_in_tiles(expert_ids, is_local, num_experts, tile_size)
    num_pairs, num_slots = len(expert_ids), len(tile_experts) * tile_size
    pairs = torch.full((num_slots + 1,), num_pairs, device=expert_ids.device)
    pairs.index_copy_(0, slots, torch.arange(num_pairs, device=expert_ids.device))
    return pairs[:num_slots], tile_experts
