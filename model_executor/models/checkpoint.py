"""Every tensor a V4.1 checkpoint holds, with shape and dtype, as a function of its configuration. Loads nothing."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from deepinfer_plugin.model_executor.models.shape import ModelShape

GROUP = 32  # channels, or rows and channels, that share one power-of-two factor


class Format(Enum):
    """How an array of numbers lies in the checkpoint; all but BF16 and F32 are a `.weight` with a `.scale`."""

    BF16 = "bf16"
    F32 = "f32"
    FP8_BLOCKS = "fp8, one factor per 32 rows x 32 channels"
    FP8_ROWS = "fp8, one factor per row and 32 channels"
    FP4 = "fp4, two channels a byte, one factor per row and 32 channels"


@dataclass(frozen=True)
class Entry:
    """One array of the network; `name` has no `.weight` where the format adds it, `shape` is that of the numbers."""

    name: str
    shape: tuple[int, ...]
    format: Format


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the checkpoint as it is stored; `name` is bare."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def bare_name(name: str) -> str:
    """`name` without one leading `model.`, which a checkpoint may have or not."""
    return name.removeprefix("model.")


def entries(shape: ModelShape) -> Iterator[Entry]:
    """Every array of the checkpoint, quantised pairs as one entry, in the order of the model specification.

    A vision encoder of 0 layers has no `vision.*` and no `aligner.*`.

    Source: model specification, section 5.
    """
    s, last_draft = shape, shape.num_nextn_predict_layers - 1
    yield from _prefixed("", _globals(s))
    for layer in range(s.num_hidden_layers):
        yield from _prefixed(f"layers.{layer}.", _block(s, s.n_routed_experts) | _backbone_extras(s, layer))
    for draft in range(s.num_nextn_predict_layers):
        extras = (_first_draft(s) if draft == 0 else {}) | (_last_draft(s) if draft == last_draft else {})
        yield from _prefixed(f"mtp.{draft}.", _block(s, s.dspark_n_routed_experts) | extras)
    if s.vision.num_hidden_layers:
        yield from _prefixed("vision.", _vision(s))
        yield from _prefixed("aligner.", _aligner(s))


def stored(entry: Entry) -> tuple[TensorSpec, ...]:
    """The tensors that hold `entry`: one, or a weight and its factors.

    Source: model specification, section 4.1.
    """
    if entry.format is Format.BF16:
        return (TensorSpec(entry.name, entry.shape, torch.bfloat16),)
    if entry.format is Format.F32:
        return (TensorSpec(entry.name, entry.shape, torch.float32),)
    rows, columns = entry.shape
    groups = -(-columns // GROUP)
    weight, dtype, sf_rows = {
        Format.FP8_BLOCKS: ((rows, columns), torch.float8_e4m3fn, -(-rows // GROUP)),
        Format.FP8_ROWS: ((rows, columns), torch.float8_e4m3fn, rows),
        Format.FP4: ((rows, columns // 2), torch.int8, rows),
    }[entry.format]
    return (
        TensorSpec(f"{entry.name}.weight", weight, dtype),
        TensorSpec(f"{entry.name}.scale", (sf_rows, groups), torch.float8_e8m0fnu),
    )


def expected_tensors(shape: ModelShape) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint with this configuration, as it is stored."""
    return (spec for entry in entries(shape) for spec in stored(entry))


def check_tensor(expected: Mapping[str, TensorSpec], name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor that the network has no place for.

    Args:
        expected: bare name -> tensor, for all of `expected_tensors` or the part that is to be loaded.
        name: with or without the leading `model.`.
        tensor: as read from the file; only shape and dtype are looked at.

    Raises:
        ValueError: `name` is not expected, or has another shape or dtype.
    """
    spec = expected.get(bare_name(name))
    found = f"{tuple(tensor.shape)} {tensor.dtype}"
    if spec is None:
        raise ValueError(f"checkpoint: V4.1 with this configuration has no tensor {name}, found one of {found}")
    if spec.shape != tuple(tensor.shape) or spec.dtype != tensor.dtype:
        raise ValueError(f"checkpoint: {name} must be {spec.shape} {spec.dtype}, found {found}")


def check_missing(expected: Collection[str], found: Collection[str]) -> None:
    """Refuses a checkpoint that lacks tensors.

    Args:
        expected: bare names that must be there.
        found: names that were there, with or without the leading `model.`.

    Raises:
        ValueError: names are missing; the message has their number and the first few.
    """
    have = {bare_name(name) for name in found}
    if missing := [name for name in expected if name not in have]:
        first = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        raise ValueError(f"checkpoint: all {len(expected)} tensors must be there, {len(missing)} missing: {first}")


Table = dict[str, tuple[tuple[int, ...], Format]]


def _prefixed(prefix: str, table: Table) -> Iterator[Entry]:
    return (Entry(prefix + name, size, kind) for name, (size, kind) in table.items())


def _globals(s: ModelShape) -> Table:
    return {
        "embed.weight": ((s.vocab_size, s.hidden_size), Format.BF16),
        "norm.weight": ((s.hidden_size,), Format.BF16),
        "head.weight": ((s.vocab_size, s.hidden_size), Format.BF16),
        **{f"image_{role}": ((s.hidden_size,), Format.BF16) for role in ("start", "end", "newline")},
    }


def _block(s: ModelShape, num_experts: int) -> Table:
    hidden, rank, width = s.hidden_size, s.q_lora_rank, s.num_attention_heads * s.head_dim
    num_mixes, streams = s.hc_mult * (s.hc_mult + 2), s.hc_mult * hidden
    experts = [_mlp(f"ffn.experts.{e}", hidden, s.moe_intermediate_size, Format.FP4) for e in range(num_experts)]
    shared_size = s.moe_intermediate_size * s.n_shared_experts
    return {
        **{f"hc_{part}_fn": ((num_mixes, streams), Format.F32) for part in ("attn", "ffn")},
        **{f"hc_{part}_base": ((num_mixes,), Format.F32) for part in ("attn", "ffn")},
        **{f"hc_{part}_scale": ((3,), Format.F32) for part in ("attn", "ffn")},
        **{f"{part}_norm.weight": ((hidden,), Format.BF16) for part in ("attn", "ffn")},
        "attn.wq_a": ((rank, hidden), Format.FP8_BLOCKS),
        "attn.q_norm.weight": ((rank,), Format.BF16),
        "attn.wq_b": ((width, rank), Format.FP8_BLOCKS),
        "attn.wkv": ((s.head_dim, hidden), Format.FP8_BLOCKS),
        "attn.kv_norm.weight": ((s.head_dim,), Format.BF16),
        "attn.attn_sink": ((s.num_attention_heads,), Format.F32),
        "attn.wo_a": ((s.o_groups * s.o_lora_rank, width // s.o_groups), Format.FP8_BLOCKS),
        "attn.wo_b": ((hidden, s.o_groups * s.o_lora_rank), Format.FP8_BLOCKS),
        "ffn.gate.weight": ((num_experts, hidden), Format.BF16),
        "ffn.gate.bias": ((num_experts,), Format.F32),
        "ffn.gate.bias_vl": ((num_experts,), Format.F32),
        **{name: row for expert in experts for name, row in expert.items()},
        **_mlp("ffn.shared_experts", hidden, shared_size, Format.FP8_BLOCKS),
    }


def _mlp(name: str, hidden_size: int, intermediate_size: int, kind: Format) -> Table:
    up, down = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
    return {f"{name}.w1": (up, kind), f"{name}.w3": (up, kind), f"{name}.w2": (down, kind)}


def _backbone_extras(s: ModelShape, layer: int) -> Table:
    table: Table = {}
    if layer in s.kv_source_layer_ids:
        table["attn.compressor.wkv.weight"] = ((s.head_dim, s.hidden_size), Format.BF16)
        if s.ratio(layer) > 1:  # with one token an entry there is nothing to weigh
            table["attn.compressor.wgate.weight"] = ((s.head_dim, s.hidden_size), Format.BF16)
        table["attn.compressor.norm.weight"] = ((s.head_dim,), Format.BF16)
        table["attn.indexer.wk.weight"] = ((s.index_head_dim, s.head_dim), Format.BF16)
        table["attn.indexer.k_norm.weight"] = ((s.index_head_dim,), Format.BF16)
    if layer in s.index_source_layer_ids:
        table["attn.indexer.wq_b"] = ((s.index_n_heads * s.index_head_dim, s.q_lora_rank), Format.FP8_BLOCKS)
        table["attn.indexer.weights_proj.weight"] = ((s.index_n_heads, s.hidden_size), Format.BF16)
    if layer in s.engram_layer_ids:
        num_rows = s.engram_num_embeddings[s.engram_layer_ids.index(layer)]
        num_columns = (s.engram_max_ngram_size - 1) * s.engram_n_heads * s.engram_head_dim
        key_values = (s.hc_mult + 1) * s.hidden_size
        table["engram.embed"] = ((num_rows, s.engram_head_dim), Format.FP8_ROWS)
        table["engram.wkv"] = ((key_values, num_columns), Format.FP8_BLOCKS)
        table["engram.q_weight"] = ((s.hc_mult, s.hidden_size), Format.BF16)
        table["engram.k_weight"] = ((s.hc_mult, s.hidden_size), Format.BF16)
    return table


def _first_draft(s: ModelShape) -> Table:
    features = len(s.dspark_target_layer_ids) * s.hidden_size
    return {
        "main_proj": ((s.hidden_size, features), Format.FP8_BLOCKS),
        "main_norm.weight": ((s.hidden_size,), Format.BF16),
    }


def _last_draft(s: ModelShape) -> Table:
    return {
        "norm.weight": ((s.hidden_size,), Format.BF16),
        "markov_head.embed.weight": ((s.vocab_size, s.dspark_markov_rank), Format.BF16),
        "markov_head.head.weight": ((s.vocab_size, s.dspark_markov_rank), Format.BF16),
        "confidence_head.proj.weight": ((1, s.hidden_size + s.dspark_markov_rank), Format.BF16),
    }


def _vision(s: ModelShape) -> Table:
    width, intermediate = s.vision.hidden_size, s.vision.intermediate_size
    block = {
        "norm1.weight": (width,),
        "norm2.weight": (width,),
        "attn.wqkv.weight": (3 * width, width),
        "attn.wqkv.bias": (3 * width,),
        "attn.wo.weight": (width, width),
        "attn.wo.bias": (width,),
        "mlp.w1.weight": (2 * intermediate, width),
        "mlp.w2.weight": (width, intermediate),
    }
    sizes = {
        "patch_embed.proj.weight": (width, 3 * s.vision.patch_size**2),
        "patch_embed.proj.bias": (width,),
        **{f"blocks.{b}.{name}": size for b in range(s.vision.num_hidden_layers) for name, size in block.items()},
        "norm.weight": (width,),
    }
    return {name: (size, Format.BF16) for name, size in sizes.items()}


def _aligner(s: ModelShape) -> Table:
    merged = s.vision.hidden_size * s.vision.downsample_ratio**2
    sizes = {
        "w1.weight": (s.hidden_size, merged),
        "w1.bias": (s.hidden_size,),
        "w2.weight": (s.hidden_size, s.hidden_size),
        "w2.bias": (s.hidden_size,),
    }
    return {name: (size, Format.BF16) for name, size in sizes.items()}
