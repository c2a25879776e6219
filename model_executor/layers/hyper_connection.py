"""Hyper-connections: what stands between two sub-layers. Four residual streams are mixed, and one is read out."""

from dataclasses import dataclass

import torch
from torch import nn

from deepinfer_plugin.kernels.fake_quant import round_fp8
from deepinfer_plugin.kernels.hyper_connection import (
    collapse_streams,
    mix_collapse_norm,
    mix_streams,
    stream_coefficients,
)
from deepinfer_plugin.kernels.rms_norm import rms_norm
from deepinfer_plugin.kernels.streams import beside, join
from deepinfer_plugin.model_executor.models.shape import ModelShape


@dataclass
class StreamState:
    """What travels from sub-layer to sub-layer, per row.

    streams: [num_tokens, hc_mult, hidden_size]; read_out: fp32 [num_tokens, hc_mult], the previous sub-layer's `pre`;
    output: what is to be mixed into `streams` and with which coefficients, until somebody needs them mixed.
    """

    streams: torch.Tensor
    read_out: torch.Tensor
    output: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def start(cls, embedding: torch.Tensor, hc_mult: int) -> "StreamState":
        """Every stream holds the embedding, and the first sub-layer reads stream 0."""
        read_out = torch.zeros(embedding.shape[0], hc_mult, dtype=torch.float32, device=embedding.device)
        read_out[:, 0] = 1
        return cls(embedding.unsqueeze(1).repeat(1, hc_mult, 1), read_out)

    def mixed(self) -> torch.Tensor:
        """The streams, with the last sub-layer's output in them."""
        join(self.streams.device)
        if self.output is not None:
            self.streams, self.output = mix_streams(self.streams, *self.output), None
        return self.streams

    def mean(self) -> torch.Tensor:
        """The mean of the mixed streams, in fp32, rounded once: [num_tokens, hidden_size]."""
        first, *others = self.streams.unbind(1)
        total = first.float()
        for stream in others:  # one after the other: the order of the sum is the same in every batch
            total = total + stream
        return (total / self.streams.shape[1]).to(self.streams.dtype)

    def read(self) -> torch.Tensor:
        """The streams read out by the last sub-layer's `pre`, not normalised: [num_tokens, hidden_size]."""
        return collapse_streams(self.mixed(), self.read_out)

    def normalised(self, weight: torch.Tensor, eps: float, round_to_fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The streams read out by the last sub-layer's `pre`, normalised: [num_tokens, hidden_size].

        Twice: as it is, and rounded to FP8 if it is to be.
        """
        join(self.streams.device)
        if self.output is None:
            hidden = rms_norm(collapse_streams(self.streams, self.read_out), weight, eps)
            return hidden, round_fp8(hidden) if round_to_fp8 else hidden
        mixed = mix_collapse_norm(self.streams, *self.output, self.read_out, weight, eps, round_to_fp8)
        self.streams, self.output = mixed[0], None
        return mixed[1:]


class HyperConnection(nn.Module):
    """Weights: `fn`, `base`, `scale` of one sub-layer, fp32; `norm` is the sub-layer's input norm.

    The sub-layer's input is read with the *previous* sub-layer's coefficients (model specification, section 2.2).
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, round_activations: bool) -> None:
        super().__init__()
        self.round_activations = round_activations
        m, rows = shape.hc_mult, shape.hc_mult * (shape.hc_mult + 2)
        self.fn = nn.Parameter(torch.empty(rows, m * shape.hidden_size, dtype=torch.float32), requires_grad=False)
        self.base = nn.Parameter(torch.empty(rows, dtype=torch.float32), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32), requires_grad=False)
        self.norm = nn.Parameter(torch.empty(shape.hidden_size, dtype=dtype), requires_grad=False)
        self.norm_eps, self.hc_eps, self.num_iters = shape.rms_norm_eps, shape.hc_eps, shape.hc_sinkhorn_iters

    def before(self, state: StreamState) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The sub-layer's input [num_tokens, hidden_size], the same for products, and how its output goes back.

        Replaces `state.read_out` by this sub-layer's `pre`, for the next one.
        """
        hidden_states, rounded = state.normalised(self.norm, self.norm_eps, self.round_activations)
        with beside(rounded.device):  # not needed before the sub-layer's output is there
            state.read_out, post, comb = stream_coefficients(
                state.streams, self.fn, self.scale, self.base, self.norm_eps, self.hc_eps, self.num_iters
            )
        return hidden_states, rounded, (post, comb)

    @staticmethod
    def after(state: StreamState, output: torch.Tensor, coefficients: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Mix the sub-layer's output [num_tokens, hidden_size], rounded to the streams' dtype, into the streams."""
        state.output = (output, *coefficients)
