"""Clamped SwiGLU, the activation inside every V4.1 expert."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def swiglu(
    gate_up: torch.Tensor, limit: float, route_weights: torch.Tensor | None = None, round_to_fp8: bool = False
) -> torch.Tensor:
    """Return ``silu(min(gate, limit)) * clamp(up, -limit, limit) * route_weight``, computed in fp32.

    Args:
        gate_up: [num_tokens, 2 * intermediate_size], bf16 or fp32, last dim contiguous; gate first, then up.
        limit: `swiglu_limit` of the checkpoint's config (V4.1: 10.0), > 0.
        route_weights: [num_tokens], fp32: one factor a row; None = 1.
        round_to_fp8: round the result by `round_fp8`, for an FP8 product; intermediate_size is a multiple of 32.

    Returns:
        [num_tokens, intermediate_size], contiguous: fp32, or rounded to FP8 in bf16, which holds it exactly. A row's
        result does not depend on the other rows.

    Raises:
        ValueError: wrong rank, odd width, strided last dim, `limit` not positive, `route_weights` not one fp32 a row,
            or a width that cannot be rounded.

    Source: model specification, section 2.9.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        got = f"shape {tuple(gate_up.shape)}, strides {gate_up.stride()}"
        raise ValueError(f"swiglu: gate_up must be [num_tokens, 2n] with contiguous rows, got {got}")
    if limit <= 0:
        raise ValueError(f"swiglu: limit must be positive, got {limit}")
    if route_weights is not None and (route_weights.shape != gate_up.shape[:1] or route_weights.dtype != torch.float32):
        got = f"{tuple(route_weights.shape)} {route_weights.dtype}"
        raise ValueError(f"swiglu: route_weights must be [{gate_up.shape[0]}] fp32, got {got}")
    if round_to_fp8 and gate_up.shape[1] % 64:
        width = gate_up.shape[1] // 2
        raise ValueError(f"swiglu: intermediate_size must be a multiple of 32 to be rounded to FP8, got {width}")
    return TABLE(gate_up, limit, route_weights, round_to_fp8)
