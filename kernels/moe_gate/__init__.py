"""The router of a V4.1 MoE layer: which experts a token visits, and with what weights."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def moe_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    image_bias: torch.Tensor,
    is_image: torch.Tensor | None,
    top_k: int,
    routed_scaling_factor: float,
    is_padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `top_k` experts with the largest ``sqrt(softplus(logit)) + bias``; weigh them by the unbiased scores.

    The weights of a token are its chosen scores over their sum (plus 1e-20), times `routed_scaling_factor`. On ties the
    lower expert id wins. Padding rows visit no expert, whose weights would have to be read: their ids are num_experts,
    which no rank holds, and their weights 0.

    Args:
        logits: [num_tokens, num_experts], fp32.
        bias: [num_experts], fp32: selection bias of text tokens.
        image_bias: [num_experts], fp32: selection bias of the tokens of an image span, delimiters included.
        is_image: [num_tokens], bool; None = all text.
        top_k: experts a token, 1..num_experts.
        routed_scaling_factor: of the checkpoint's config (V4.1: 1.5).
        is_padding: [num_tokens], bool; None = no row is.

    Returns:
        topk_ids [num_tokens, top_k], int64, ascending in every row; topk_weights [num_tokens, top_k], fp32, in that
        order. A row's result does not depend on the other rows.

    Raises:
        ValueError: shapes or dtypes that do not fit, or `top_k` out of range.

    Source: model specification, section 2.9.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32:
        got = f"{tuple(logits.shape)} {logits.dtype}"
        raise ValueError(f"moe_gate: logits must be [num_tokens, num_experts] fp32, got {got}")
    num_tokens, num_experts = logits.shape
    if bias.shape != (num_experts,) or image_bias.shape != (num_experts,):
        got = f"{tuple(bias.shape)} and {tuple(image_bias.shape)}"
        raise ValueError(f"moe_gate: bias and image_bias must be [{num_experts}], got {got}")
    if bias.dtype != torch.float32 or image_bias.dtype != torch.float32:
        raise ValueError(f"moe_gate: bias and image_bias must be fp32, got {bias.dtype} and {image_bias.dtype}")
    for name, flags in (("is_image", is_image), ("is_padding", is_padding)):
        if flags is not None and (flags.shape != (num_tokens,) or flags.dtype != torch.bool):
            got = f"{tuple(flags.shape)} {flags.dtype}"
            raise ValueError(f"moe_gate: {name} must be [{num_tokens}] bool, got {got}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"moe_gate: top_k must be in 1..{num_experts}, got {top_k}")
    return TABLE(logits, bias, image_bias, is_image, top_k, routed_scaling_factor, is_padding)
