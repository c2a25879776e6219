"""The routed experts of a V4.1 MoE layer, or this rank's share of them."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch
from deepinfer_plugin.kernels.packed_weights import Fp4Weight

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


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
    """Sum ``w2 @ round(swiglu(w13 @ x) * weight)`` over every token's chosen local experts.

    The intermediate results stay fp32; `round` is `round_fp8` or nothing. The sum runs in the order of `topk_ids`, so
    it is in ascending expert order for the ids of `moe_gate`.

    Args:
        x: [num_tokens, hidden_size], bf16 or fp32, exact in bf16 beside packed weights; rounded to FP8 already, as
            the activation will be.
        w13: [num_local_experts, 2 * intermediate_size, hidden_size], fp32 or FP4; gate rows first, then up rows.
        w2: [num_local_experts, hidden_size, intermediate_size], fp32 or FP4.
        topk_ids: [num_tokens, top_k], int64, distinct and ascending in every row. Ids outside [expert_start,
            expert_start + num_local_experts), -1 included, contribute nothing.
        topk_weights: [num_tokens, top_k], fp32: applied before the activation is rounded.
        expert_start: id of the first local expert.
        limit: `swiglu_limit` of the checkpoint's config, > 0.
        round_activation: round the second product's input to FP8; False = for debugging.
        added: [num_tokens, hidden_size], fp32, added to the sum, last: the shared expert's output, say.

    Returns:
        [num_tokens, hidden_size], fp32: this rank's partial sum, not rounded. A row does not depend on the other rows.

    Raises:
        ValueError: shapes or dtypes that do not fit, or `limit` not positive.

    Source: model specification, section 2.9.
    """
    if x.dim() != 2 or len(w13.shape) != 3 or len(w2.shape) != 3:
        got = f"{tuple(x.shape)}, {tuple(w13.shape)} and {tuple(w2.shape)}"
        raise ValueError(f"moe_experts: x must be a matrix, w13 and w2 stacks of matrices, got {got}")
    num_experts, intermediate_size = w2.shape[0], w2.shape[2]
    if w2.shape[1] != x.shape[1] or w13.shape != (num_experts, 2 * intermediate_size, x.shape[1]):
        got = f"{tuple(w13.shape)} and {tuple(w2.shape)} for hidden_size {x.shape[1]}"
        raise ValueError(f"moe_experts: w13 must be [E, 2n, hidden_size] and w2 [E, hidden_size, n], got {got}")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_weights.shape != topk_ids.shape:
        got = f"{tuple(topk_ids.shape)} and {tuple(topk_weights.shape)} for {x.shape[0]} tokens"
        raise ValueError(f"moe_experts: topk_ids and topk_weights must be [num_tokens, top_k], got {got}")
    if topk_ids.dtype != torch.int64 or topk_weights.dtype != torch.float32:
        got = f"{topk_ids.dtype} and {topk_weights.dtype}"
        raise ValueError(f"moe_experts: topk_ids must be int64 and topk_weights fp32, got {got}")
    if isinstance(w13, Fp4Weight) != isinstance(w2, Fp4Weight):
        raise ValueError(f"moe_experts: w13 and w2 must be stored alike, got {type(w13)} and {type(w2)}")
    for weight in (w13, w2):
        if isinstance(weight, torch.Tensor) and weight.dtype != torch.float32:
            raise ValueError(f"moe_experts: w13 and w2 must be fp32 or packed FP4, got {weight.dtype}")
    if added is not None and (added.shape != x.shape or added.dtype != torch.float32):
        raise ValueError(f"moe_experts: added must be fp32 {tuple(x.shape)}, got {added.dtype} {tuple(added.shape)}")
    if limit <= 0:
        raise ValueError(f"moe_experts: limit must be positive, got {limit}")
    return TABLE(x, w13, w2, topk_ids, topk_weights, expert_start, limit, round_activation, added)
