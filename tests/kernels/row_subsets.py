"""The property every op of `kernels/` has: a row's result is bitwise the same alone, in any batch, in any order."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

try:
    import triton
except ImportError:  # not beside the CPU vLLM
    triton = None

NUM_ROWS = (0, 1, 2, 15, 16, 17, 33, 100)  # around multiples of the tiles' heights, and not a multiple


is_interpreted = triton is not None and triton.knobs.runtime.interpret
thread_counts = [1] if is_interpreted else [1, 2, 16]


def each_thread_count() -> Iterator[int]:
    """Run the loop's body with every number of `thread_counts`."""
    before = torch.get_num_threads()
    try:
        for num_threads in thread_counts:
            torch.set_num_threads(num_threads)
            yield num_threads
    finally:
        torch.set_num_threads(before)


def assert_rows_are_independent(op: Callable[..., Any], *rows: torch.Tensor) -> None:
    """Compare `op` of all rows with `op` of single rows, of the first few and of random choices in any order.

    All are the first 100, and 33 of them where an interpreter computes.
    """
    rows = tuple(row[:33] if is_interpreted else row for row in rows)
    num_rows = len(rows[0])
    whole = _as_tuple(op(*rows))
    orders = [torch.randperm(num_rows)[:n] for n in ((17,) if is_interpreted else NUM_ROWS)]
    starts = [torch.arange(n) for n in ((0, 2) if is_interpreted else NUM_ROWS)]
    singles = [torch.tensor([i]) for i in ((num_rows - 1,) if is_interpreted else (0, 1, 15, 16, num_rows - 1))]
    for num_threads in each_thread_count():
        for index in (*orders, *singles, *starts):
            index = index.to(rows[0].device)
            part = _as_tuple(op(*(row[index] for row in rows)))
            for got, want in zip(part, whole, strict=True):
                differing = int((got != want[index]).sum())
                assert torch.equal(got, want[index]), f"{len(index)} rows, {num_threads} threads: {differing} differ"


def _as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
