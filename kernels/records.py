"""What a row of a cache looks like in memory: plain numbers, or one of V4.1's packed records.

A record holds a row's codes, then its scales, side by side. Encoding is the last rounding that the model was trained
with, so a decoded record is `round_fp8` (or its FP4 kin) of the row, exactly.
"""

from enum import Enum

import torch

from deepinfer_plugin.kernels.quant_formats import (
    BLOCK_SIZE,
    KV_GROUP_SIZE,
    decode_fp4,
    decode_fp4_kv,
    decode_fp8_rows,
    encode_fp4,
    encode_fp4_kv,
    encode_fp8_rows,
)


class Record(Enum):
    """The format of a cache's rows.

    PLAIN: the numbers themselves, in the cache's dtype.
    FP8: E4M3 codes, then an E8M0 byte per 32 channels (512 channels: 528 bytes). Local KV; compressed KV as an option.
    FP4_KV: two E2M1 codes a byte, then an E4M3 byte per 16 channels (512 channels: 288 bytes). Compressed KV.
    FP4_INDEX: two E2M1 codes a byte, then an E8M0 byte per 32 channels (128 channels: 68 bytes). Index keys.

    Source: model specification, sections 4.3 and 4.4.
    """

    PLAIN = "plain"
    FP8 = "fp8"
    FP4_KV = "fp4_kv"
    FP4_INDEX = "fp4_index"

    @property
    def group_size(self) -> int:
        """Channels that share a scale; 1 where nothing is packed."""
        return {Record.PLAIN: 1, Record.FP4_KV: KV_GROUP_SIZE}.get(self, BLOCK_SIZE)

    def num_bytes(self, width: int) -> int:
        """Bytes of a record of `width` channels; for PLAIN, its number of elements."""
        if self is Record.PLAIN:
            return width
        return (width if self is Record.FP8 else width // 2) + width // self.group_size

    def width(self, num_bytes: int) -> int:
        """Channels of a record of `num_bytes`: the inverse of `num_bytes`."""
        if self is Record.PLAIN:
            return num_bytes
        group_bytes = (self.group_size if self is Record.FP8 else self.group_size // 2) + 1
        return num_bytes // group_bytes * self.group_size

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., width], float -> records [..., num_bytes(width)], uint8. PLAIN: the rows as they are."""
        if self is Record.PLAIN:
            return rows
        width = rows.shape[-1]
        if self is Record.FP8:
            codes, sf = encode_fp8_rows(rows)
        elif self is Record.FP4_KV:
            codes, sf = encode_fp4_kv(rows)
        else:
            codes, sf = encode_fp4(rows.reshape(-1, width))
            codes, sf = codes.view(*rows.shape[:-1], width // 2), sf.view(*rows.shape[:-1], width // BLOCK_SIZE)
        return torch.cat((codes.view(torch.uint8), sf.view(torch.uint8)), dim=-1)

    def decode(self, records: torch.Tensor) -> torch.Tensor:
        """Records [..., num_bytes(width)], uint8 -> [..., width], fp32. PLAIN: the rows as they are."""
        if self is Record.PLAIN:
            return records
        width = self.width(records.shape[-1])
        codes, sf = records.split((records.shape[-1] - width // self.group_size, width // self.group_size), dim=-1)
        if self is Record.FP8:
            return decode_fp8_rows(codes.contiguous().view(torch.float8_e4m3fn), sf.contiguous())
        if self is Record.FP4_KV:
            return decode_fp4_kv(codes, sf.contiguous().view(torch.float8_e4m3fn))
        rows = decode_fp4(codes.reshape(-1, codes.shape[-1]), sf.reshape(-1, sf.shape[-1]))
        return rows.view(*records.shape[:-1], width)
