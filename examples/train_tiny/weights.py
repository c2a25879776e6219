"""Weights to start from, and weights out of a checkpoint folder: fp32, by the names of `network.stacked_name`."""

import json
import math
import zlib
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from network import Weights, stacked_name
from safetensors.torch import load_file
from torch import Tensor

from deepinfer_plugin.kernels.quant_formats import decode_fp4, decode_fp8_blocks, decode_fp8_rows
from deepinfer_plugin.model_executor.models.checkpoint import Entry, Format, entries, stored
from deepinfer_plugin.model_executor.models.shape import ModelShape
from deepinfer_plugin.model_executor.models.tiny import mix_base

DECODE = {Format.FP8_BLOCKS: decode_fp8_blocks, Format.FP8_ROWS: decode_fp8_rows, Format.FP4: decode_fp4}
NOT_TRAINED = ("vision.*", "aligner.*", "image_*")  # no training text has an image

# (name pattern, mean, deviation); the first that fits counts. Other matrices: 1 / sqrt(in-features).
START: tuple[tuple[str, float, float], ...] = (
    ("*norm*.weight", 1.0, 0.0),
    ("*.attn_sink", 0.0, 0.0),
    ("*.hc_*_scale", 0.01, 0.0),
    ("*.gate.bias*", 0.0, 0.0),
    ("*.engram.[qk]_weight", 1.0, 0.0),
    ("*.engram.embed", 0.0, 0.5),
    ("image_*", 0.0, 0.5),
    ("embed.weight", 0.0, 0.5),
    ("*.markov_head.embed.weight", 0.0, 0.5),
    ("*.markov_head.head.weight", 0.0, 0.01),
    ("*.confidence_head.*", 0.0, 0.01),
    ("*.bias", 0.0, 0.0),
)
# sublayers add to the streams: the more there are, the less each may add at first
OUTPUTS = ("*.wo_b", "*.w2", "*.engram.wkv")
OUTPUT_GAIN = 0.25


def initial_weights(shape: ModelShape, seed: int) -> Weights:
    """Fresh weights; every array depends on its name, its shape and `seed` alone."""
    return _stacked({entry.name: _start(entry, shape, seed) for entry in entries(shape)})


def read_weights(folder: Path) -> tuple[ModelShape, Weights]:
    """The weights of a checkpoint folder, decoded; every value is exactly what the checkpoint holds."""
    shape = ModelShape.from_json(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    tensors: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    arrays = {}
    for entry in entries(shape):
        parts = [tensors[spec.name] for spec in stored(entry)]
        arrays[entry.name] = DECODE[entry.format](*parts) if entry.format in DECODE else parts[0].float()
    return shape, _stacked(arrays)


def unstacked(weights: Weights, entry: Entry) -> Tensor:
    """The array of one checkpoint entry."""
    name = stacked_name(entry.name)
    if name == entry.name:
        return weights[name]
    return weights[name][int(entry.name.partition(".experts.")[2].partition(".")[0])]


def _stacked(arrays: Weights) -> Weights:
    groups: dict[str, list[Tensor]] = {}
    for name, array in arrays.items():
        groups.setdefault(stacked_name(name), []).append(array)
    return {name: torch.stack(group) if ".experts." in name else group[0] for name, group in groups.items()}


def _start(entry: Entry, shape: ModelShape, seed: int) -> Tensor:
    if fnmatchcase(entry.name, "*.hc_*_base"):
        return mix_base(int(entry.name.split(".")[1]), shape.hc_mult)
    generator = torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(entry.name.encode()))
    normal = torch.randn(entry.shape, generator=generator)
    for pattern, mean, deviation in START:
        if fnmatchcase(entry.name, pattern):
            return mean + deviation * normal
    gain = OUTPUT_GAIN if any(fnmatchcase(entry.name, pattern) for pattern in OUTPUTS) else 1.0
    return normal * (gain / math.sqrt(entry.shape[-1]))
