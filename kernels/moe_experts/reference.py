"""The definition of `moe_experts`: what every other module of this folder must equal.

Pairs (token, expert) are sorted by expert into tiles of TILE_SIZE rows, so that a product sees one expert's rows and
always the same shape. The number of tiles is bounded on the host: nothing waits for the device.
"""

from functools import cache

import torch

from deepinfer_plugin.kernels.quant_formats import round_fp8
from deepinfer_plugin.kernels.row_gemm import TILE_SIZE, tile_gemm
from deepinfer_plugin.kernels.swiglu import swiglu


def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_start: int,
    limit: float,
    round_input: bool,
) -> torch.Tensor:
    (num_tokens, hidden_size), (num_experts, _, intermediate_size), top_k = x.shape, w2.shape, topk_ids.shape[1]
    if num_experts == 0 or topk_ids.numel() == 0:
        return x.new_zeros(num_tokens, hidden_size, dtype=torch.float32)
    expert_ids = topk_ids.flatten() - expert_start
    is_local = (expert_ids >= 0) & (expert_ids < num_experts)
    if num_tokens == 1:  # its experts are distinct: a tile each, nothing to sort
        slots, tile_experts = _slots_of_one_token(top_k, x.device), expert_ids.clamp(0, num_experts - 1)
    else:
        slots, tile_experts = _tiles(expert_ids, is_local, num_experts)
    num_tiles = len(tile_experts)
    num_slots = num_tiles * TILE_SIZE

    inputs = round_fp8(x.float()) if round_input else x.float()
    pair_inputs = inputs.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, hidden_size)
    rows = pair_inputs.new_zeros(num_slots + 1, hidden_size).index_copy_(0, slots, pair_inputs)[:num_slots]
    weights = topk_weights.new_zeros(num_slots + 1).index_copy_(0, slots, topk_weights.flatten())[:num_slots]

    gate_up = tile_gemm(rows.view(num_tiles, TILE_SIZE, hidden_size), w13, tile_experts)
    activation = swiglu(gate_up.view(num_slots, 2 * intermediate_size), limit, weights)
    activation = round_fp8(activation) if round_input else activation
    outputs = tile_gemm(activation.view(num_tiles, TILE_SIZE, intermediate_size), w2, tile_experts)

    pair_outputs = outputs.view(num_slots, hidden_size)[slots.clamp(max=num_slots - 1)]
    pair_outputs.masked_fill_(~is_local.unsqueeze(1), 0)
    first, *others = pair_outputs.view(num_tokens, top_k, hidden_size).unbind(1)
    return sum(others, start=first)


@cache
def _slots_of_one_token(top_k: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, top_k * TILE_SIZE, TILE_SIZE, device=device)


def _tiles(expert_ids: torch.Tensor, is_local: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give every pair a row of a tile of its expert.

    Returns the slot of each pair (tile * TILE_SIZE + row; one past the last tile for pairs that are not local) and the
    expert of each tile (arbitrary for tiles without rows).
    """
    num_pairs, device = len(expert_ids), expert_ids.device
    num_tiles = min(num_pairs, num_pairs // TILE_SIZE + num_experts)
    group = torch.where(is_local, expert_ids, num_experts)  # the last group collects what is not ours
    sorted_group, order = group.sort(stable=True)
    starts = torch.searchsorted(sorted_group, torch.arange(num_experts + 2, device=device))
    tile_ends = ((starts.diff() + TILE_SIZE - 1) // TILE_SIZE)[:num_experts].cumsum(0)
    tile_experts = torch.searchsorted(tile_ends, torch.arange(num_tiles, device=device), right=True)
    first_slots = torch.cat([tile_ends.new_zeros(1), tile_ends]) * TILE_SIZE  # [num_experts + 1]
    sorted_slots = (first_slots - starts[:-1])[sorted_group] + torch.arange(num_pairs, device=device)
    sorted_slots.masked_fill_(sorted_group == num_experts, num_tiles * TILE_SIZE)
    slots = torch.empty_like(order).index_copy_(0, order, sorted_slots)
    return slots, tile_experts.clamp_(max=num_experts - 1)
