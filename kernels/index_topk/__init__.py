"""The indexer: which compressed entries, and which candidate blocks of them, a query attends to."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch
from deepinfer_plugin.kernels.paged import Pages

TOPK_TABLE = Dispatch(__name__, "index_topk", cpu="reference", nvidia="triton_nvidia")
CANDIDATES_TABLE = Dispatch(__name__, "topk_candidate_blocks", cpu="reference", nvidia="triton_nvidia")
BOTH_TABLE = Dispatch(__name__, "index_topk_with_candidates", cpu="reference", nvidia="triton_nvidia")


def index_topk(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    keys: Pages,
    num_visible: torch.Tensor,
    topk: int,
    candidate_blocks: torch.Tensor | None,
    candidate_block_size: int,
) -> torch.Tensor:
    """The `topk` visible entries with the highest ``sum_h weight_h * relu(query_h . key)``, in fp32; ties to the lower.

    The result of a row does not depend, bitwise, on the other rows of the call. Rows may come in any order; it is
    fast when the rows of a request follow each other, because keys are gathered once per 16 such rows.

    Args:
        query: [num_tokens, num_heads, head_dim], bf16 or fp32.
        head_weights: [num_tokens, num_heads], bf16 or fp32; may be negative, and no factor is multiplied in.
        keys: the index keys, plain or records, by entry.
        num_visible: [num_tokens], int64; entries 0 .. num_visible - 1 may be chosen. 0 for a padding row.
        topk: entries to choose, >= 1.
        candidate_blocks: [num_tokens, n], int32, as `topk_candidate_blocks` returns them: only entries inside these
            blocks may be chosen; -1 is no block. None: no such limit.
        candidate_block_size: entries in a candidate block; not used without `candidate_blocks`.

    Returns:
        [num_tokens, topk], int32, ascending, -1 at the end where fewer entries may be chosen.

    Raises:
        ValueError: shapes that do not fit, or sizes not positive.

    Source: model specification, section 2.6.
    """
    _check("index_topk", query, head_weights, keys, num_visible)
    _check_positive("index_topk", topk=topk)
    if candidate_blocks is not None:
        _check_positive("index_topk", candidate_block_size=candidate_block_size)
        if candidate_blocks.dim() != 2 or candidate_blocks.shape[0] != query.shape[0]:
            got = tuple(candidate_blocks.shape)
            raise ValueError(f"index_topk: candidate_blocks must be [{query.shape[0]}, n], got {got}")
    return TOPK_TABLE(query, head_weights, keys, num_visible, topk, candidate_blocks, candidate_block_size)


def topk_candidate_blocks(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    keys: Pages,
    num_visible: torch.Tensor,
    num_blocks: int,
    block_size: int,
) -> torch.Tensor:
    """The `num_blocks` blocks of `block_size` entries with the highest visible score; ties to the lower block.

    A block counts if it has a visible entry. Its score is the highest of its visible entries', limited to the largest
    finite bf16; the newest block that counts is always chosen.

    Args:
        query, head_weights, keys, num_visible: as for `index_topk`.
        num_blocks: blocks to choose, >= 1.
        block_size: entries in a block, >= 1 (V4.1: 8).

    Returns:
        [num_tokens, num_blocks], int32, ascending, -1 at the end where fewer blocks count.

    Raises:
        ValueError: shapes that do not fit, or sizes not positive.

    Source: model specification, section 2.6.
    """
    _check("topk_candidate_blocks", query, head_weights, keys, num_visible)
    _check_positive("topk_candidate_blocks", num_blocks=num_blocks, block_size=block_size)
    return CANDIDATES_TABLE(query, head_weights, keys, num_visible, num_blocks, block_size)


def index_topk_with_candidates(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    keys: Pages,
    num_visible: torch.Tensor,
    topk: int,
    num_candidate_blocks: int,
    candidate_block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`index_topk` without candidate blocks, `topk_candidate_blocks`) from one scoring.

    Args:
        query, head_weights, keys, num_visible, topk: as for `index_topk`.
        num_candidate_blocks, candidate_block_size: as for `topk_candidate_blocks`.

    Returns:
        [num_tokens, topk] and [num_tokens, num_candidate_blocks], int32, ascending, -1 at the end.

    Raises:
        ValueError: shapes that do not fit, or sizes not positive.

    Source: model specification, section 2.6.
    """
    name = "index_topk_with_candidates"
    _check(name, query, head_weights, keys, num_visible)
    _check_positive(name, topk=topk, num_blocks=num_candidate_blocks, block_size=candidate_block_size)
    return BOTH_TABLE(query, head_weights, keys, num_visible, topk, num_candidate_blocks, candidate_block_size)


def _check(name: str, query: torch.Tensor, head_weights: torch.Tensor, keys: Pages, num_visible: torch.Tensor) -> None:
    if query.dim() != 3 or head_weights.shape != query.shape[:2] or keys.width != query.shape[2]:
        got = f"{tuple(query.shape)}, {tuple(head_weights.shape)} and cache {tuple(keys.cache.shape)}"
        raise ValueError(f"{name}: query must be [n, h, d], head_weights [n, h] and the cache [b, s, d], got {got}")
    if num_visible.shape != query.shape[:1] or keys.request_ids.shape != query.shape[:1]:
        got = f"{tuple(num_visible.shape)} and {tuple(keys.request_ids.shape)}"
        raise ValueError(f"{name}: num_visible and request_ids must be [{query.shape[0]}], got {got}")


def _check_positive(name: str, **sizes: int) -> None:
    for size, got in sizes.items():
        if got < 1:
            raise ValueError(f"{name}: {size} must be positive, got {got}")
