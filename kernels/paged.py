"""Reading rows of a paged cache: which slot holds a state of a request, and the rows at many states at once.

A *state* is one row of a request's cache, counted from 0: a position for local KV, a compressed entry for global KV.
"""

from dataclasses import dataclass

import torch

from deepinfer_plugin.kernels.records import Record


@dataclass(frozen=True)
class Pages:
    """One layer's paged cache as the rows of a batch see it. Owns nothing: it lives for one call.

    Args:
        cache: [num_blocks, states_per_block, width], or records of that many bytes (uint8); any strides, so blocks may
            stand apart from each other. Slots that no row asks for may hold anything, NaN included.
        block_table: [num_requests, max_blocks], int32; entries past a request's last block are never followed.
        request_ids: [num_tokens], int64; the row of `block_table` that each token of the batch reads.
        record: the format of the cache's rows.

    Raises:
        ValueError: wrong rank, or a cache of another dtype than its records'.
    """

    cache: torch.Tensor
    block_table: torch.Tensor
    request_ids: torch.Tensor
    record: Record = Record.PLAIN

    def __post_init__(self) -> None:
        if self.cache.dim() != 3 or self.block_table.dim() != 2 or self.request_ids.dim() != 1:
            got = f"{tuple(self.cache.shape)}, {tuple(self.block_table.shape)} and {tuple(self.request_ids.shape)}"
            rule = "cache must be [num_blocks, states_per_block, width], block_table 2-D and request_ids 1-D"
            raise ValueError(f"paged: {rule}, got {got}")
        if (self.record is Record.PLAIN) != (self.cache.dtype != torch.uint8):
            raise ValueError(f"paged: a cache of {self.record.value} records cannot be {self.cache.dtype}")

    @property
    def width(self) -> int:
        """Channels of a row."""
        return self.record.width(self.cache.shape[2])

    def slots(self, states: torch.Tensor) -> torch.Tensor:
        """`block * states_per_block + offset` of each state, the number that `store_kv_cache` takes.

        Args:
            states: [num_tokens] or [num_tokens, n], int64 or int32; a negative state is none.

        Returns:
            the shape of `states`, int64; -1 for none.
        """
        size = self.cache.shape[1]
        slots = torch.add(states % size, self._blocks(states), alpha=size)
        return slots.long().masked_fill_(states < 0, -1)

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """The rows at slot numbers of any shape; zeros at slot -1. [..., width], dtype of the cache (records: fp32)."""
        size = self.cache.shape[1]
        rows = self.record.decode(self.cache[slots // size, slots % size])
        return rows.masked_fill_((slots < 0).unsqueeze(-1), 0)

    def gather_states(self, states: torch.Tensor) -> torch.Tensor:
        """`gather(slots(states))` in fewer steps."""
        absent = states < 0
        return self.gather_present(states, absent).masked_fill_(absent.unsqueeze(-1), 0)

    def gather_present(self, states: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
        """`gather_states`, but with anything, NaN included, where `absent`, which must be `states < 0`."""
        # the table may hold anything where a state is absent: block 0 is read instead
        blocks = self._blocks(states).masked_fill_(absent, 0)
        return self.record.decode(self.cache[blocks, states % self.cache.shape[1]])

    def _blocks(self, states: torch.Tensor) -> torch.Tensor:
        requests = self.request_ids if states.dim() == 1 else self.request_ids.unsqueeze(1)
        return self.block_table[requests, states // self.cache.shape[1]]  # a state of -1 reads the last column
