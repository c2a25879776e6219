"""The definition of `swiglu`: what every other module of this folder must equal."""

import torch


def swiglu(gate_up: torch.Tensor, limit: float, route_weights: torch.Tensor | None) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=1)
    gate = gate.clamp(max=limit)
    # Not torch's silu: on CPU its last bit depends on the element's place in the tensor. exp's does not.
    activation = gate / (1 + torch.exp(-gate)) * up.clamp(-limit, limit)
    return activation if route_weights is None else activation * route_weights.unsqueeze(1)
