"""The two rotary tables of V4.1, and this step's rows of them."""

from dataclasses import dataclass

import torch
from torch import nn

from deepinfer_plugin.kernels.rope_table import rope_table
from deepinfer_plugin.model_executor.models.shape import ModelShape


@dataclass(frozen=True)
class Rotation:
    """cos and sin of a step's rows, fp32 [num_tokens, qk_rope_head_dim] each.

    window: for window-only layers; scaled: for every rotation in a layer with global memory;
    entry: `scaled` at the first position of the compressed entry that the row belongs to, by ratio.
    """

    window: torch.Tensor
    scaled: torch.Tensor
    entry: dict[int, torch.Tensor]

    def of(self, ratio: int) -> torch.Tensor:
        return self.scaled if ratio else self.window


class RotaryTables(nn.Module):
    """Both tables up to `max_model_len`, fp32, computed on the device that uses them."""

    def __init__(self, shape: ModelShape, max_model_len: int) -> None:
        super().__init__()
        width = shape.qk_rope_head_dim
        self.ratios = sorted({q for q in shape.compress_ratios if q})
        window = rope_table(max_model_len, width, shape.rope_theta, None, torch.get_default_device())
        scaled = rope_table(max_model_len, width, shape.compress_rope_theta, shape.yarn, torch.get_default_device())
        self.register_buffer("window", window, persistent=False)
        self.register_buffer("scaled", scaled, persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """positions: [num_tokens] int64; a negative (padding) row reads the table's first."""
        rows = positions.clamp(min=0)
        entry = {q: self.scaled[rows // q * q] if q > 1 else self.scaled[rows] for q in self.ratios}
        return Rotation(self.window[rows], entry[1] if 1 in entry else self.scaled[rows], entry)
