"""Engram's hashed n-gram memory: from the classes of the last tokens to table rows, and from rows to vectors."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

HASH_TABLE = Dispatch(__name__, "engram_hash", cpu="reference", nvidia="triton_nvidia")
LOOKUP_TABLE = Dispatch(__name__, "engram_lookup", cpu="reference", nvidia="triton_nvidia")


def engram_hash(
    class_ids: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """``roll_k mod prime[k, h] + offset`` with ``roll_k = a_0 * mult_0 xor .. xor a_{k+1} * mult_{k+1}``.

    Args:
        class_ids: [num_tokens, max_ngram], int64; a_0 is the class of the token itself, a_k of the k-th before it, with
            the pad class already in place of positions before the start and behind an image. Not negative.
        multipliers: [max_ngram], int64; products with class ids stay below 2**63.
        primes: [max_ngram - 1, num_heads], int64; the row counts, orders 2 .. max_ngram.
        offsets: [(max_ngram - 1) * num_heads], int64; the exclusive prefix sum over `primes`, order-major.

    Returns:
        [num_tokens, (max_ngram - 1) * num_heads], int64, order-major then head.

    Raises:
        ValueError: shapes that do not fit.

    Source: model specification, section 2.8 (d).
    """
    orders, heads = primes.shape
    if class_ids.dim() != 2 or class_ids.shape[1] != orders + 1 or multipliers.shape != (orders + 1,):
        got = f"{tuple(class_ids.shape)}, {tuple(multipliers.shape)} and {tuple(primes.shape)}"
        raise ValueError(f"engram_hash: class_ids [n, g], multipliers [g] and primes [g - 1, h] must fit, got {got}")
    if offsets.shape != (orders * heads,):
        raise ValueError(f"engram_hash: offsets must be [{orders * heads}], got {tuple(offsets.shape)}")
    return HASH_TABLE(class_ids, multipliers, primes, offsets)


def engram_lookup(rows: torch.Tensor, table: torch.Tensor, sf: torch.Tensor, row_start: int) -> torch.Tensor:
    """The decoded table rows of each token, side by side; zeros for rows that this shard does not hold.

    The shards' results sum to the whole table's, exactly: of every row, all but one addend are zero.

    Args:
        rows: [num_tokens, num_columns], int64; row numbers of the whole table, -1 for none (an image token).
        table: [num_rows, head_dim], float8_e4m3fn; this shard's rows, at least one. head_dim a multiple of 32.
        sf: [num_rows, head_dim / 32], uint8 or float8_e8m0fnu; exponent bytes, one per 32 channels.
        row_start: the number, in the whole table, of the shard's first row.

    Returns:
        [num_tokens, num_columns * head_dim], fp32.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: model specification, sections 2.8 (e) and 4.1.
    """
    if rows.dim() != 2:
        raise ValueError(f"engram_lookup: rows must be [num_tokens, num_columns], got {tuple(rows.shape)}")
    if table.dim() != 2 or table.shape[0] == 0 or table.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"engram_lookup: table must be float8_e4m3fn [num_rows, head_dim], got {table.dtype} {tuple(table.shape)}"
        )
    if table.shape[1] % 32 or sf.shape != (table.shape[0], table.shape[1] // 32) or sf.element_size() != 1:
        got = f"{sf.dtype} {tuple(sf.shape)} for a table of {tuple(table.shape)}"
        raise ValueError(f"engram_lookup: sf must be bytes [num_rows, head_dim / 32], got {got}")
    return LOOKUP_TABLE(rows, table, sf, row_start)
