"""The definition of `engram_gate`: what every other module of this folder must equal."""

import torch

MIN_MAGNITUDE = 1e-6  # of the normalised dot product, before its square root


def engram_gate(
    streams: torch.Tensor,
    key_values: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    skip: torch.Tensor | None,
) -> torch.Tensor:
    num_streams, hidden_size = q_weight.shape
    x, keys, value = streams.float(), key_values[:, :num_streams].float(), key_values[:, num_streams:].float()
    weight = q_weight.float() * k_weight.float()
    dot = (x * keys * weight).sum(dim=-1, keepdim=True)  # [num_tokens, m, 1]
    dot = dot * _inverse_rms(x, eps) * _inverse_rms(keys, eps) * hidden_size**-0.5
    root = torch.copysign(dot.abs().clamp(min=MIN_MAGNITUDE).sqrt(), dot)
    # Not torch.sigmoid: on CPU its last bit depends on the element's place in the tensor. exp's does not.
    gate = 1 / (1 + torch.exp(-root))
    out = (x + gate * value).to(streams.dtype)
    return out if skip is None else torch.where(skip.view(-1, 1, 1), streams, out)


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
