"""The property every op of `kernels/` has: a row's result is bitwise the same alone, in any batch, in any order."""

from collections.abc import Callable
from typing import Any

import torch

NUM_ROWS = (0, 1, 2, 15, 16, 17, 33, 100)  # around the tile height of 16, and not a multiple of it


def assert_rows_are_independent(op: Callable[..., Any], *rows: torch.Tensor) -> None:
    """Compare `op` of 100 rows with `op` of single rows, of the first few, and of random choices in random order."""
    num_rows = len(rows[0])
    whole = _as_tuple(op(*rows))
    orders = [torch.randperm(num_rows)[:n] for n in NUM_ROWS]
    singles = [torch.tensor([i]) for i in (0, 1, 15, 16, num_rows - 1)]
    for index in (*orders, *singles, *(torch.arange(n) for n in NUM_ROWS)):
        index = index.to(rows[0].device)
        part = _as_tuple(op(*(row[index] for row in rows)))
        for got, want in zip(part, whole, strict=True):
            assert torch.equal(got, want[index]), f"{len(index)} rows: {(got != want[index]).sum()} elements differ"


def _as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
