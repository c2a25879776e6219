"""The definition of `rms_norm`: what every other module of this folder must equal."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
