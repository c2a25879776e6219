"""Linear layers of V4.1: vLLM's sharding, our storage and our product.

A weight is decoded once, when it is loaded, to fp32: exact for every format of the checkpoint, and the dtype in which
products are accumulated (kernel specification, section 7). Or it stays as the checkpoint holds it, FP8 bytes with their
scales or BF16, and is decoded in the product.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.parameter import ModelWeightParameter

from deepinfer_plugin.kernels.linear import linear
from deepinfer_plugin.kernels.linear_fp8 import linear_fp8
from deepinfer_plugin.kernels.packed_weights import Fp4Weight, Fp8Weight
from deepinfer_plugin.kernels.quant_formats import BLOCK_SIZE
from deepinfer_plugin.kernels.target import current_target

PackedWeight = TypeVar("PackedWeight", Fp8Weight, Fp4Weight)


def weight_dtype(packed: bool) -> torch.dtype:
    """The dtype of a weight that is not quantised: the checkpoint's, or fp32, which its product accumulates in."""
    return torch.bfloat16 if packed else torch.float32


class DecodedLinearMethod(LinearMethodBase):
    """Stores `weight` [output_size, input_size] decoded, and multiplies as its `LinearFormat` says."""

    def __init__(self, linear_format: "LinearFormat") -> None:
        self.format = linear_format

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        dtype = weight_dtype(self.format.packed)
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=dtype)
        weight = ModelWeightParameter(
            data=data, input_dim=1, output_dim=0, weight_loader=extra_weight_attrs["weight_loader"]
        )
        layer.register_parameter("weight", weight)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out_dtype = self.format.out_dtype or x.dtype
        if self.format.is_fp8:
            return linear_fp8(x, layer.weight, out_dtype)
        return linear(x, layer.weight, out_dtype)


class PackedLinearMethod(LinearMethodBase):
    """Stores `weight` [output_size, input_size] as FP8 bytes and `weight_sf` as their scales' bytes.

    `models/weights.py` fills both, by their `shard_dim`: the dimension that tensor-parallel ranks share, or None.
    """

    def __init__(self, linear_format: "LinearFormat") -> None:
        self.format = linear_format

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        if any(size % BLOCK_SIZE for size in (*output_partition_sizes, columns)):
            got = f"{output_partition_sizes} x {columns}"
            raise ValueError(f"packed weights: a rank's rows and columns must be multiples of {BLOCK_SIZE}, got {got}")
        shard_dim = 1 if columns != input_size else 0 if rows != output_size else None
        codes, sf = fp8_parameters(rows, columns)
        for name, parameter in (("weight", codes), ("weight_sf", sf)):
            parameter.shard_dim = shard_dim
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.packed = Fp8Weight(layer.weight.data.view(torch.uint8), layer.weight_sf.data)
        layer.packed.check_scales()
        layer.packed = ready_for_kernels(layer.packed)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear_fp8(x, layer.packed, self.format.out_dtype or x.dtype)


@dataclass
class LinearFormat(QuantizationConfig):
    """How one kind of linear is stored in the checkpoint and what its product looks like.

    is_fp8: FP8 weights, and an input that has been rounded to FP8; otherwise BF16 weights with the input as it is.
    out_dtype: dtype of the product; None for the input's.
    packed: keep the weight in the checkpoint's bytes.
    """

    is_fp8: bool
    out_dtype: torch.dtype | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> DecodedLinearMethod | PackedLinearMethod:
        return PackedLinearMethod(self) if self.packed and self.is_fp8 else DecodedLinearMethod(self)

    def get_name(self) -> str:
        return "deepinfer"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LinearFormat":
        raise NotImplementedError("LinearFormat: made by the layers, not read from a checkpoint")


DUMMY_SCALE = 120


def fp8_parameters(rows: int, columns: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """Codes [rows, columns] of an FP8 weight, E4M3, and the scales of its 32x32 blocks, uint8."""
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    return torch.nn.Parameter(codes, requires_grad=False), scales(rows // BLOCK_SIZE, columns // BLOCK_SIZE)


def fp4_parameters(experts: int, rows: int, columns: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """Codes [experts, rows, columns / 2] of FP4 experts, two a byte, and a scale per 32 columns, uint8."""
    codes = torch.randint(256, (experts, rows, columns // 2), dtype=torch.uint8)  # dummy weights in 0.32 keep bytes
    return torch.nn.Parameter(codes, requires_grad=False), scales(experts, rows, columns // BLOCK_SIZE)


def scales(*shape: int) -> torch.nn.Parameter:
    """E8M0 bytes, uint8: 2**-7 until they are loaded, which vLLM's load_format=dummy leaves, beside random codes."""
    parameter = torch.nn.Parameter(torch.full(shape, DUMMY_SCALE, dtype=torch.uint8), requires_grad=False)
    parameter.dummy_weight_value = DUMMY_SCALE
    return parameter


def ready_for_kernels(weight: PackedWeight) -> PackedWeight:
    """`weight` with its codes in the order that this process's kernels read, changed in place."""
    return weight.interleave(in_place=True) if current_target().interleaves else weight


class PackedByLayer(QuantizeMethodBase):
    """Tells a layer that keeps packed weights of its own that they are all there: `layer.pack_weights()`."""

    def create_weights(self, layer: torch.nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        raise NotImplementedError(f"{type(layer).__name__} makes its weights itself")

    def apply(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError(f"{type(layer).__name__} multiplies itself")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.pack_weights()
