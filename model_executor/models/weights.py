"""From the checkpoint's tensors to the model's parameters: names, codes with their scale factors, decoding, merging.

Tensors are taken one at a time, as they are read; a weight and its scale factors are decoded when both are there.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank

from deepinfer_plugin.kernels.quant_formats import decode_fp4, decode_fp8_blocks
from deepinfer_plugin.model_executor.models.checkpoint import bare_name, check_missing, check_tensor, expected_tensors
from deepinfer_plugin.model_executor.models.shape import ModelShape

# what the text model loads; the rest is draft blocks, vision encoder, projector, image delimiters
BACKBONE = ("embed.", "layers.", "norm.", "head.")

RENAMED = {
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn_norm.weight": "attn_hc.norm",
    "ffn_norm.weight": "ffn_hc.norm",
    "attn.q_norm.weight": "attn.q_norm",
    "attn.kv_norm.weight": "attn.kv_norm",
    "attn.wo_a.weight": "attn.wo_a",
    "attn.compressor.norm.weight": "attn.compressor.norm",
    "attn.indexer.wk.weight": "attn.compressor.wk",
    "attn.indexer.k_norm.weight": "attn.compressor.k_norm",
    "attn.indexer.weights_proj.weight": "attn.indexer.weights_proj",
    "engram.embed.weight": "engram.table",
    "engram.embed.scale": "engram.table_sf",
    "main_norm.weight": "main_norm",
    "norm.weight": "norm",
    "markov_head.embed.weight": "markov_head.embed",
    "confidence_head.proj.weight": "confidence_head.proj",
}
# checkpoint suffix -> (parameter, place in the merged parameter)
MERGED_IN_LAYERS = {  # not in draft blocks, which multiply by `wkv` alone for the target's rows
    "attn.wq_a.weight": ("attn.wqkv_a.weight", 0),
    "attn.wkv.weight": ("attn.wqkv_a.weight", 1),
}
MERGED = {
    "attn.compressor.wkv.weight": ("attn.compressor.wkv.weight", 0),
    "attn.compressor.wgate.weight": ("attn.compressor.wkv.weight", 1),
    "ffn.shared_experts.w1.weight": ("ffn.gate_up_proj.weight", 0),
    "ffn.shared_experts.w3.weight": ("ffn.gate_up_proj.weight", 1),
    "ffn.shared_experts.w2.weight": ("ffn.down_proj.weight", None),
}


@dataclass(frozen=True)
class Destination:
    """Where a checkpoint tensor goes: the parameter's name, and its place if several tensors share the parameter."""

    parameter: str
    place: int | None = None


def destination(name: str) -> Destination:
    """The parameter that the (non-expert) checkpoint tensor `name` goes to."""
    head, _, rest = name.partition(".")
    if head not in ("layers", "mtp"):
        return Destination(RENAMED.get(name, name))
    layer, _, suffix = rest.partition(".")
    merged = MERGED | MERGED_IN_LAYERS if head == "layers" else MERGED
    if suffix in merged:
        parameter, place = merged[suffix]
        return Destination(f"{head}.{layer}.{parameter}", place)
    return Destination(f"{head}.{layer}.{RENAMED.get(suffix, suffix)}")


def load_packed(parameter: nn.Parameter, tensor: torch.Tensor, place: int | None, rank: int) -> None:
    """Copy this rank's bytes of `tensor` into a packed linear's codes or scales.

    Args:
        parameter: with `shard_dim`, the dimension that ranks share; None: every rank holds all.
        tensor: [rows, columns], uint8, as in the checkpoint.
        place: None, or 0 or 1 of two matrices that share the parameter, the first one's rows first. Only matrices of
            equal height may be shared by ranks.
    """
    dim = parameter.shard_dim
    if dim is not None:
        size = parameter.shape[dim] // (1 if place is None else 2)
        tensor = tensor.narrow(dim, rank * size, size)
    first = parameter.shape[0] - tensor.shape[0] if place == 1 else 0
    parameter.data.view(torch.uint8)[first : first + tensor.shape[0]].copy_(tensor)


class WeightLoader:
    """Loads a checkpoint into a model's parameters and checks that it is exactly the one the shape describes.

    part: beginnings of the names of tensors that the model has parameters for; the others are only checked.
    """

    def __init__(self, model: nn.Module, shape: ModelShape, part: tuple[str, ...]) -> None:
        self.part = part
        self.parameters = dict(model.named_parameters())
        self.modules = dict(model.named_modules())
        self.expected = {spec.name: spec for spec in expected_tensors(shape)}
        self.seen: set[str] = set()
        self.waiting: dict[str, torch.Tensor] = {}  # halves of (codes, scale factors) pairs
        self.loaded: set[str] = set()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Consume (name, tensor) pairs in any order; return the names of the parameters that were filled.

        Raises:
            ValueError: a tensor is missing, is not part of V4.1, or has another shape or dtype.
        """
        for full_name, tensor in weights:
            name = bare_name(full_name)
            check_tensor(self.expected, name, tensor)
            self.seen.add(name)
            if name.startswith(self.part):
                self._take(name, tensor)
        check_missing(self.expected, self.seen)
        return self.loaded

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        stem, _, kind = name.rpartition(".")
        is_paired = kind in ("weight", "scale") and f"{stem}.scale" in self.expected
        if not is_paired or ".engram.embed." in name:
            self._put(name, tensor)
            return
        partner = f"{stem}.{'scale' if kind == 'weight' else 'weight'}"
        if partner not in self.waiting:
            self.waiting[name] = tensor
            return
        other = self.waiting.pop(partner)
        codes, sf = (tensor, other) if kind == "weight" else (other, tensor)
        if self._parameter(f"{stem}.weight", "_sf") in self.parameters:
            self._put(f"{stem}.weight", codes.view(torch.uint8))
            self._put(f"{stem}.weight", sf.view(torch.uint8), "_sf")
            return
        decode: Callable[..., torch.Tensor] = decode_fp4 if codes.dtype == torch.int8 else decode_fp8_blocks
        self._put(f"{stem}.weight", decode(codes, sf))

    @staticmethod
    def _parameter(name: str, suffix: str) -> str:
        """The parameter that checkpoint tensor `name` goes to; suffix `_sf`: that of a packed one's scales."""
        parts = name.split(".")
        if "experts" in parts:
            return ".".join((*parts[:3], "experts", "w2" if parts[5] == "w2" else "w13")) + suffix
        return destination(name).parameter + suffix

    def _put(self, name: str, tensor: torch.Tensor, suffix: str = "") -> None:
        parts, full_name = name.split("."), self._parameter(name, suffix)
        parameter, module = self.parameters[full_name], self.modules[full_name.rpartition(".")[0]]
        self.loaded.add(full_name)
        if "experts" in parts:
            module.load(int(parts[4]), parts[5], tensor, suffix)
            return
        target = destination(name)
        if ".engram.embed." in name:
            module.load_rows(parameter, tensor)
        elif name.endswith(".attn_sink") or name.endswith(".wo_a.weight"):
            module.load_shard(parameter, tensor)
        elif hasattr(parameter, "shard_dim"):
            load_packed(parameter, tensor, target.place, get_tensor_model_parallel_rank())
        elif target.place is None or "gate_up_proj" in target.parameter:
            loader = getattr(parameter, "weight_loader", None)
            arguments = () if target.place is None else (target.place,)
            loader(parameter, tensor, *arguments) if loader else parameter.data.copy_(tensor)
        else:  # a replicated parameter of two matrices, the first one's rows first
            rows = tensor.shape[0]
            first = 0 if target.place == 0 else parameter.shape[0] - rows
            parameter.data[first : first + rows].copy_(tensor)
