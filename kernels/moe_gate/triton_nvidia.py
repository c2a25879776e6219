"""`moe_gate` in Triton: a program a row, the experts chosen one after the other."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_launch import chained, follow


def moe_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    image_bias: torch.Tensor,
    is_image: torch.Tensor | None,
    top_k: int,
    routed_scaling_factor: float,
    is_padding: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    topk_ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    topk_weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _moe_gate[(num_tokens,)](
            *(logits, bias, image_bias, is_image, is_padding, topk_ids, topk_weights, logits.stride(0), num_experts),
            *(routed_scaling_factor, top_k),
            HAS_IMAGES=is_image is not None,
            BLOCK=triton.next_power_of_2(num_experts),
            num_warps=1 if num_experts <= 512 else 4,
            **chained(),
        )
    return topk_ids, topk_weights


@triton.jit
def _moe_gate(
    logits,
    bias,
    image_bias,
    is_image,
    is_padding,
    topk_ids,
    topk_weights,
    stride,
    num_experts,
    routed_scaling_factor,
    TOP_K: tl.constexpr,
    HAS_IMAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    follow()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < num_experts
    scores = tl.sqrt(softplus(tl.load(logits + row * stride + expert, inside, 0.0)))
    shift = tl.load(bias + expert, inside, 0.0)
    if HAS_IMAGES:
        image_shift = tl.load(image_bias + expert, inside, 0.0)
        shift = tl.where(tl.load(is_image + row) != 0, image_shift, shift)
    biased = tl.where(inside, scores + shift, -float("inf"))
    chosen = expert < 0
    for _ in range(TOP_K):
        best = tl.argmax(tl.where(chosen, -float("inf"), biased), 0, tie_break_left=True)
        chosen = chosen | (expert == best)
    total = tl.sum(tl.where(chosen, scores, 0.0)) + 1e-20
    place = row * TOP_K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    ids, weights = expert.to(tl.int64), scores / total * routed_scaling_factor
    if is_padding is not None:
        pads = tl.load(is_padding + row) != 0
        ids, weights = tl.where(pads, num_experts, ids), tl.where(pads, 0.0, weights)
    tl.store(topk_ids + place, ids, chosen)
    tl.store(topk_weights + place, weights, chosen)


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``, accurate for small results too."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1 + e
    log1p = tl.where(u == 1, e, tl.log(u) * (e / (u - 1)))  # the rounding of u cancels
    return tl.where(x > 20.0, x, log1p)
