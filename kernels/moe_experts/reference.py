"""The definition of `moe_experts`: what every other module of this folder must equal.

A product sees the rows of one expert, in tiles, and always the same shape.
"""

from functools import cache

import torch

from deepinfer_plugin.kernels.moe_experts.tiles import slots_in_tiles
from deepinfer_plugin.kernels.packed_weights import Fp4Weight
from deepinfer_plugin.kernels.quant_formats import round_fp8
from deepinfer_plugin.kernels.row_gemm import TILE_SIZE, tile_gemm
from deepinfer_plugin.kernels.swiglu import swiglu


def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor | Fp4Weight,
    w2: torch.Tensor | Fp4Weight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_start: int,
    limit: float,
    round_activation: bool,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    routed = _routed(x, w13, w2, topk_ids, topk_weights, expert_start, limit, round_activation)
    return routed if added is None else routed + added


def _routed(
    x: torch.Tensor,
    w13: torch.Tensor | Fp4Weight,
    w2: torch.Tensor | Fp4Weight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_start: int,
    limit: float,
    round_activation: bool,
) -> torch.Tensor:
    (num_tokens, hidden_size), (num_experts, _, intermediate_size), top_k = x.shape, w2.shape, topk_ids.shape[1]
    if num_experts == 0 or topk_ids.numel() == 0:
        return x.new_zeros(num_tokens, hidden_size, dtype=torch.float32)
    expert_ids = topk_ids.flatten() - expert_start
    is_local = (expert_ids >= 0) & (expert_ids < num_experts)
    if isinstance(w13, Fp4Weight) and isinstance(w2, Fp4Weight):
        reached = expert_ids[is_local].unique()  # decode these alone
        w13, w2, num_experts = w13.decoded(reached), w2.decoded(reached), len(reached)
        if num_experts == 0:
            return x.new_zeros(num_tokens, hidden_size, dtype=torch.float32)
        expert_ids = torch.searchsorted(reached, expert_ids).clamp_(max=num_experts - 1)
    if num_tokens == 1:  # its experts are distinct: a tile each, nothing to sort
        slots, tile_experts = _slots_of_one_token(top_k, x.device), expert_ids.clamp(0, num_experts - 1)
    else:
        slots, tile_experts = slots_in_tiles(expert_ids, is_local, num_experts, TILE_SIZE)
    num_tiles = len(tile_experts)
    num_slots = num_tiles * TILE_SIZE

    pair_inputs = x.float().unsqueeze(1).expand(-1, top_k, -1).reshape(-1, hidden_size)
    rows = pair_inputs.new_zeros(num_slots + 1, hidden_size).index_copy_(0, slots, pair_inputs)[:num_slots]
    weights = topk_weights.new_zeros(num_slots + 1).index_copy_(0, slots, topk_weights.flatten())[:num_slots]

    gate_up = tile_gemm(rows.view(num_tiles, TILE_SIZE, hidden_size), w13, tile_experts)
    activation = swiglu(gate_up.view(num_slots, 2 * intermediate_size), limit, weights)
    activation = round_fp8(activation) if round_activation else activation
    outputs = tile_gemm(activation.view(num_tiles, TILE_SIZE, intermediate_size), w2, tile_experts)

    pair_outputs = outputs.view(num_slots, hidden_size)[slots.clamp(max=num_slots - 1)]
    pair_outputs.masked_fill_(~is_local.unsqueeze(1), 0)
    first, *others = pair_outputs.view(num_tokens, top_k, hidden_size).unbind(1)
    return sum(others, start=first)


@cache
def _slots_of_one_token(top_k: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, top_k * TILE_SIZE, TILE_SIZE, device=device)
