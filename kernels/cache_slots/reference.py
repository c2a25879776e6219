"""The definition of `cache_slots`: what every other module of this folder must equal."""

import torch

from deepinfer_plugin.kernels.paged import Pages


def cache_slots(pages: Pages, states: torch.Tensor) -> torch.Tensor:
    return pages.slots(states)
