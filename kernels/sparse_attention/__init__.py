"""The attention core: one softmax over the sliding window and the selected compressed entries, with a sink per head."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch
from deepinfer_plugin.kernels.paged import Pages

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


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
    """``sum_k exp(l_k) c_k / (sum_k exp(l_k) + exp(sink))`` with ``l_k = scale * query . c_k``, in fp32, rounded once.

    The keys c_k of a row, which are its values too, are the window states max(0, p - window_size + 1) .. p and the
    selected entries; a token that stands in both counts twice. No key at all gives 0, as does a padding row. The output
    is not rotated back. With a bf16 query an implementation may round the weights exp(..) to bf16 before they meet c_k.
    A row's result does not depend, bitwise, on the other rows of the call.

    Args:
        query: [num_tokens, num_heads, head_dim], bf16 or fp32; the heads of this rank.
        window: the layer's local KV, plain or records, by position. States older than the window need not exist.
        positions: [num_tokens], int64; negative for a padding row.
        window_size: keys of the window, the query's own included (V4.1: 128), >= 1.
        selected: the KV source's compressed cache, plain or records; None for a layer without global memory.
        selected_indices: [num_tokens, n], int32; entries of `selected`, -1 for none, as `index_topk` returns them. A
            padding row's must be -1. None if and only if `selected` is.
        sink: [num_heads], fp32, finite; a logit of the denominator, not multiplied by `scale`.
        scale: the softmax scale (V4.1: head_dim ** -0.5).

    Returns:
        [num_tokens, num_heads, head_dim], dtype of `query`.

    Raises:
        ValueError: shapes that do not fit, `window_size` not positive, or only one of `selected` and its indices.

    Source: model specification, section 2.7.
    """
    if query.dim() != 3 or window.width != query.shape[2] or sink.shape != query.shape[1:2]:
        got = f"{tuple(query.shape)}, cache {tuple(window.cache.shape)} and sink {tuple(sink.shape)}"
        raise ValueError(f"sparse_attention: query must be [n, h, d], caches [b, s, d] and sink [h], got {got}")
    num_tokens = query.shape[0]
    if positions.shape != (num_tokens,) or window.request_ids.shape != (num_tokens,):
        got = f"{tuple(positions.shape)} and {tuple(window.request_ids.shape)}"
        raise ValueError(f"sparse_attention: positions and request_ids must be [{num_tokens}], got {got}")
    if window_size < 1:
        raise ValueError(f"sparse_attention: window_size must be positive, got {window_size}")
    if (selected is None) != (selected_indices is None):
        given = "selected_indices" if selected is None else "selected"
        raise ValueError(f"sparse_attention: selected and selected_indices go together, got only {given}")
    if selected is not None and selected_indices is not None:
        if selected.width != query.shape[2] or selected.request_ids.shape != (num_tokens,):
            got = f"cache {tuple(selected.cache.shape)} and request_ids {tuple(selected.request_ids.shape)}"
            raise ValueError(f"sparse_attention: selected must fit query {tuple(query.shape)}, got {got}")
        if selected_indices.dim() != 2 or selected_indices.shape[0] != num_tokens:
            shape = tuple(selected_indices.shape)
            raise ValueError(f"sparse_attention: selected_indices must be [{num_tokens}, n], got {shape}")
    return TABLE(query, window, positions, window_size, selected, selected_indices, sink, scale)
