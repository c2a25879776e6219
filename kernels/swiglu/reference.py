"""The definition of `swiglu`: what every other module of this folder must equal."""

import torch

from deepinfer_plugin.kernels.quant_formats import round_fp8


def swiglu(gate_up: torch.Tensor, limit: float, route_weights: torch.Tensor | None, round_to_fp8: bool) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=1)
    gate = gate.clamp(max=limit)
    # Not torch's silu: on CPU its last bit depends on the element's place in the tensor. exp's does not.
    activation = gate / (1 + torch.exp(-gate)) * up.clamp(-limit, limit)
    activation = activation if route_weights is None else activation * route_weights.unsqueeze(1)
    return round_fp8(activation).to(torch.bfloat16) if round_to_fp8 else activation
