"""The definition of `sparse_attention`: what every other module of this folder must equal.

Every row has window_size + n keys, absent ones included, so that its products have the same shape in every batch.
"""

from dataclasses import replace

import torch

from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.row_gemm import batch_gemm, batch_gemm_nt

TILE_BYTES = 64 << 20  # fp32 keys gathered at once


def sparse_attention(
    query: torch.Tensor,
    window: Pages,
    positions: torch.Tensor,
    window_size: int,
    selected: Pages | None,
    selected_indices: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    num_keys = window_size + (0 if selected_indices is None else selected_indices.shape[1])
    tile = max(1, TILE_BYTES // (4 * num_keys * query.shape[2]))
    if query.shape[0] <= tile:
        return _attend(query, window, positions, window_size, selected, selected_indices, sink, scale)
    out = torch.empty_like(query)
    for first in range(0, query.shape[0], tile):
        rows = slice(first, first + tile)
        out[rows] = _attend(
            query[rows],
            replace(window, request_ids=window.request_ids[rows]),
            positions[rows],
            window_size,
            selected and replace(selected, request_ids=selected.request_ids[rows]),
            None if selected_indices is None else selected_indices[rows],
            sink,
            scale,
        )
    return out


def _attend(
    query: torch.Tensor,
    window: Pages,
    positions: torch.Tensor,
    window_size: int,
    selected: Pages | None,
    selected_indices: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    states = positions.unsqueeze(1) + torch.arange(1 - window_size, 1, device=query.device)
    absent = states < 0  # [num_tokens, num_keys]
    keys = window.gather_present(states, absent)
    if selected is not None and selected_indices is not None:
        no_entry = selected_indices < 0
        keys = torch.cat((keys, selected.gather_present(selected_indices, no_entry)), dim=1)
        absent = torch.cat((absent, no_entry), dim=1)
    keys = keys.masked_fill_(absent.unsqueeze(2), 0).float()  # [num_tokens, num_keys, head_dim]
    logits = batch_gemm_nt(query.float(), keys).mul_(scale).masked_fill_(absent.unsqueeze(1), float("-inf"))
    sink = sink.expand(logits.shape[:2]).unsqueeze(2)
    weights = torch.cat((logits, sink), dim=2).softmax(2)[:, :, :-1]  # the sink has a weight, but no value
    return batch_gemm(weights, keys).to(query.dtype)
