"""The definitions of the hyper-connection ops: what every other module of this folder must equal."""

from functools import cache

import torch

from deepinfer_plugin.kernels.quant_formats import round_fp8
from deepinfer_plugin.kernels.rms_norm.reference import rms_norm
from deepinfer_plugin.kernels.row_gemm import row_gemm


def mix_streams(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    injected = post.unsqueeze(-1) * y.to(streams.dtype).float().unsqueeze(1)  # [num_tokens, m, hidden_size]
    return torch.baddbmm(injected, comb.mT, streams.float()).to(streams.dtype)


def stream_coefficients(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, m, _ = streams.shape
    v = streams.flatten(1).float()
    z = row_gemm(v, fn) * torch.rsqrt(v.square().mean(dim=-1, keepdim=True) + norm_eps)
    logits = z * scale[_scale_of_logit(m, scale.device)] + base
    # Not torch.sigmoid: on CPU its last bit depends on the element's place in the tensor. exp's does not.
    gates = 1 / (1 + torch.exp(-logits[:, : 2 * m]))
    comb = _doubly_stochastic(logits[:, 2 * m :].view(num_tokens, m, m), hc_eps, num_iters)
    return gates[:, :m] + hc_eps, gates[:, m:] * 2, comb


def collapse_streams(streams: torch.Tensor, pre_mix: torch.Tensor) -> torch.Tensor:
    return torch.bmm(pre_mix.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)


def mix_collapse_norm(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre_mix: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    round_to_fp8: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mixed = mix_streams(streams, y, post, comb)
    hidden = rms_norm(collapse_streams(mixed, pre_mix), weight, eps, False)
    return mixed, hidden, round_fp8(hidden) if round_to_fp8 else hidden


def _doubly_stochastic(logits: torch.Tensor, eps: float, num_iters: int) -> torch.Tensor:
    """Sinkhorn's iteration on [num_tokens, m, m], kept as ``a[i, j] / (row[i] * column[j])``.

    Dividing the columns by their sums plus eps is ``column[j] <- sum_i a[i, j] / row[i] + eps * column[j]``: one
    product with the constant matrix, where dividing the matrix itself would take three operations. Rows likewise.
    """
    a = logits.softmax(dim=-1) + eps
    a_t = a.mT
    row, column = torch.ones_like(a[..., :1]), torch.ones_like(a[..., :1])  # [num_tokens, m, 1]
    per_row, per_column = torch.ones_like(row), torch.empty_like(column)  # their reciprocals
    column.baddbmm_(a_t, per_row, beta=eps)
    torch.reciprocal(column, out=per_column)
    for _ in range(num_iters - 1):
        row.baddbmm_(a, per_column, beta=eps)
        torch.reciprocal(row, out=per_row)
        column.baddbmm_(a_t, per_row, beta=eps)
        torch.reciprocal(column, out=per_column)
    return a * per_row * per_column.mT


@cache
def _scale_of_logit(m: int, device: torch.device) -> torch.Tensor:
    """Which of the three scales each of the 2m + m*m logits takes."""
    return torch.tensor([0] * m + [1] * m + [2] * m * m, device=device)
