"""The definitions of `engram_hash` and `engram_lookup`: what every other module of this folder must equal."""

import torch

from deepinfer_plugin.kernels.quant_formats import decode_fp8_rows


def engram_hash(
    class_ids: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    rolls = list((class_ids * multipliers).unbind(1))
    for k in range(1, len(rolls)):
        rolls[k] = rolls[k - 1] ^ rolls[k]
    rows = torch.stack(rolls[1:], dim=1).unsqueeze(2) % primes  # [num_tokens, orders, heads]
    return rows.flatten(1) + offsets


def engram_lookup(rows: torch.Tensor, table: torch.Tensor, sf: torch.Tensor, row_start: int) -> torch.Tensor:
    local = rows - row_start
    absent = (local < 0) | (local >= table.shape[0]) | (rows < 0)
    local = local.masked_fill(absent, 0)
    codes = table.view(torch.uint8)[local].view(torch.float8_e4m3fn)  # [num_tokens, num_columns, head_dim]
    decoded = decode_fp8_rows(codes, sf.view(torch.uint8)[local])
    return decoded.masked_fill_(absent.unsqueeze(-1), 0.0).flatten(1)
