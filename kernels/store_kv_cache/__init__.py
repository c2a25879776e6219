"""Writing new rows into a paged cache: local KV, compressed KV, index keys and compressor state alike."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch
from deepinfer_plugin.kernels.records import Record

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def store_kv_cache(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, record: Record = Record.PLAIN) -> None:
    """``cache[slot // states_per_block, slot % states_per_block] = row`` for every row whose slot is not -1.

    Args:
        rows: [num_tokens, width], any dtype but uint8; rounded to the dtype of `cache`, or to what its records can
            hold. Rows with slot -1 are not read.
        cache: [num_blocks, states_per_block, width], or uint8 records of `record.num_bytes(width)`; any strides;
            written to.
        slots: [num_tokens], int64; `block * states_per_block + offset`, or negative for a row that is not stored
            (padding). Slots that are stored must differ from each other: which of two rows stays is not defined.
        record: the format of the cache's rows.

    Raises:
        ValueError: ranks or sizes that do not fit.

    Source: model specification, sections 2.12 and 4.4.
    """
    ranks = (rows.dim(), cache.dim(), slots.dim())
    if ranks != (2, 3, 1) or rows.shape != (slots.shape[0], record.width(cache.shape[2])):
        got = f"rows {tuple(rows.shape)}, cache {tuple(cache.shape)}, slots {tuple(slots.shape)}"
        raise ValueError(f"store_kv_cache: rows [n, width], cache [b, s, width] and slots [n] must fit, got {got}")
    if (record is Record.PLAIN) != (cache.dtype != torch.uint8):
        raise ValueError(f"store_kv_cache: a cache of {record.value} records cannot be {cache.dtype}")
    TABLE(rows, cache, slots, record)
