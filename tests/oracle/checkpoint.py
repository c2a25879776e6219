"""Reads a checkpoint folder into float64, decoding its formats straight from their definition."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes, int64 -> float64: bit 3 is the sign, bits 0 to 2 choose the magnitude."""
    return torch.where(codes >= 8, -1.0, 1.0) * E2M1[codes % 8]


def e8m0(sf: torch.Tensor) -> torch.Tensor:
    """Exponent bytes -> float64 powers of two."""
    return 2.0 ** (sf.view(torch.uint8).double() - 127)


def decode(weight: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    """A weight with its scale factors -> float64 [N, K].

    int8 [N, K/2]: two FP4 elements a byte, the even column in the low half, a factor per row and 32 columns. float8
    [N, K]: a factor per 32x32 block, or per row and 32 columns where there are as many factor rows as rows.
    """
    factors = e8m0(sf)
    if weight.dtype == torch.int8:
        byte = weight.view(torch.uint8).long()
        values = e2m1(torch.stack([byte % 16, byte // 16], dim=2).flatten(1))
    else:
        values = weight.double()
    rows, columns = values.shape
    if factors.shape[0] != rows:
        factors = factors.repeat_interleave(32, 0)[:rows]
    return values * factors.repeat_interleave(32, 1)[:, :columns]


def read_checkpoint(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """The text configuration with the top level's ids, and all tensors but vision's by name (no `.scale`), float64."""
    config = json.loads((folder / "config.json").read_text())
    stored = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            stored |= {
                name: tensors.get_tensor(name)
                for name in tensors.keys()  # noqa: SIM118
                if not name.startswith(("vision.", "aligner."))
            }
    weights = {}
    for name, tensor in stored.items():
        if name.endswith(".scale"):
            continue
        sf = stored.get(name.removesuffix("weight") + "scale") if name.endswith(".weight") else None
        weights[name] = tensor.double() if sf is None else decode(tensor, sf)
    return config | config["text_config"], weights
