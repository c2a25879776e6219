"""The roundings that V4.1 was trained with, and where those of the caches happen."""

from dataclasses import dataclass

from deepinfer_plugin.kernels.records import Record


@dataclass(frozen=True)
class Rounding:
    """Which of the trained roundings are applied; `activations` and `kv` both on is V4.1.

    activations: FP8 inputs of FP8 and FP4 products; kv: FP8 local keys, FP4 entries, index keys and index queries.
    packed_kv: caches hold the rounded rows as records, so that storing is rounding. Needs `kv`.
    """

    activations: bool = True
    kv: bool = True
    packed_kv: bool = False

    def record(self, packed: Record) -> Record:
        """The format of a cache whose packed rows are `packed`."""
        return packed if self.packed_kv else Record.PLAIN

    def before_the_store(self, packed: Record) -> Record:
        """The rounding of rows of a cache whose packed rows are `packed`, where storing them does not round."""
        return packed if self.kv and not self.packed_kv else Record.PLAIN
