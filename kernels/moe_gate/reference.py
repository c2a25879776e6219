"""The definition of `moe_gate`: what every other module of this folder must equal."""

import torch

SOFTPLUS_IS_IDENTITY = 20.0  # softplus(x) = x above it


def moe_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    image_bias: torch.Tensor,
    is_image: torch.Tensor | None,
    top_k: int,
    routed_scaling_factor: float,
    is_padding: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Not torch's softplus: on CPU its last bit depends on the element's place in the tensor. exp's and log1p's do not.
    softplus = torch.where(logits > SOFTPLUS_IS_IDENTITY, logits, torch.log1p(torch.exp(logits)))
    scores = softplus.sqrt()
    biased = scores + (bias if is_image is None else torch.where(is_image.unsqueeze(1), image_bias, bias))
    best_first = biased.sort(dim=-1, descending=True, stable=True).indices  # stable: on ties the lower id
    topk_ids = best_first[:, :top_k].sort(dim=-1).values
    topk_scores = scores.gather(1, topk_ids)
    topk_weights = topk_scores / (topk_scores.sum(dim=-1, keepdim=True) + 1e-20) * routed_scaling_factor
    if is_padding is not None:
        topk_ids = topk_ids.masked_fill(is_padding.unsqueeze(1), logits.shape[1])
        topk_weights = topk_weights.masked_fill(is_padding.unsqueeze(1), 0.0)
    return topk_ids, topk_weights
