"""Writing new rows into a paged cache: local KV, compressed KV, index keys and compressor state alike."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

TABLE = Dispatch(__name__, cpu="reference", nvidia="reference")


def store_kv_cache(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """``cache[slot // states_per_block, slot % states_per_block] = row`` for every row whose slot is not -1.

    Args:
        rows: [num_tokens, width], any float dtype; rounded to the dtype of `cache`. Rows with slot -1 are not read.
        cache: [num_blocks, states_per_block, width], any strides; written to.
        slots: [num_tokens], int64; `block * states_per_block + offset`, or negative for a row that is not stored
            (padding). Slots that are stored must differ from each other: which of two rows stays is not defined.

    Raises:
        ValueError: ranks or sizes that do not fit.

    Source: model specification, sections 2.12 and 4.4.
    """
    if cache.dim() != 3 or rows.shape != (slots.shape[0], cache.shape[2]) or slots.dim() != 1:
        got = f"rows {tuple(rows.shape)}, cache {tuple(cache.shape)}, slots {tuple(slots.shape)}"
        raise ValueError(f"store_kv_cache: rows [n, width], cache [b, s, width] and slots [n] must fit, got {got}")
    TABLE(rows, cache, slots)
