"""What every attention of V4.1 has, in the backbone and in the draft blocks: queries, local keys, output projection."""

import torch
from torch import nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from deepinfer_plugin.kernels.grouped_linear import grouped_linear
from deepinfer_plugin.kernels.packed_weights import Fp8Weight
from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.model_executor.caches.layers import sliding_cache
from deepinfer_plugin.model_executor.layers.linear import (
    LinearFormat,
    PackedByLayer,
    fp8_parameters,
    ready_for_kernels,
    weight_dtype,
)
from deepinfer_plugin.model_executor.layers.rounding import Rounding
from deepinfer_plugin.model_executor.models.shape import ModelShape


class AttentionCore(nn.Module):
    """Weights: `q_norm`, `wq_b`, `kv_norm`, `attn_sink`, `wo_a`, `wo_b`; `local_keys` is the window's cache.

    Heads and output groups are sharded over tensor-parallel ranks; latents and local keys are replicated.
    Source: model specification, sections 2.4 and 2.7.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, rounding: Rounding, packed: bool, prefix: str) -> None:
        super().__init__()
        tp_size = get_tensor_model_parallel_world_size()
        if shape.o_groups % tp_size:
            raise ValueError(
                f"tensor parallelism: its size must divide o_groups = {shape.o_groups} of the checkpoint, got {tp_size}"
            )
        d, self.round_activations, self.eps = shape.head_dim, rounding.activations, shape.rms_norm_eps
        self.head_dim, self.num_heads = d, shape.num_attention_heads // tp_size
        self.q_lora_rank, self.num_groups = shape.q_lora_rank, shape.o_groups // tp_size
        self.window, self.scale = shape.sliding_window, d**-0.5

        fp8 = LinearFormat(is_fp8=True, packed=packed)
        partial = LinearFormat(is_fp8=True, out_dtype=torch.float32, packed=packed)
        options = {"bias": False, "return_bias": False}
        self.q_norm = nn.Parameter(torch.empty(shape.q_lora_rank, dtype=dtype), requires_grad=False)
        self.kv_norm = nn.Parameter(torch.empty(d, dtype=dtype), requires_grad=False)
        self.wq_b = ColumnParallelLinear(
            shape.q_lora_rank, shape.num_attention_heads * d, quant_config=fp8, prefix=f"{prefix}.wq_b", **options
        )
        self.attn_sink = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32), requires_grad=False)
        group_width = shape.num_attention_heads * d // shape.o_groups
        self.packed = packed
        if packed:
            rows = self.num_groups * shape.o_lora_rank
            self.wo_a, self.wo_a_sf = fp8_parameters(rows, group_width)
            self.quant_method = PackedByLayer()
        else:
            self.wo_a = nn.Parameter(
                torch.empty(self.num_groups, shape.o_lora_rank, group_width, dtype=weight_dtype(packed)),
                requires_grad=False,
            )
        self.wo_b = RowParallelLinear(
            shape.o_groups * shape.o_lora_rank,
            shape.hidden_size,
            quant_config=partial,
            reduce_results=False,
            prefix=f"{prefix}.wo_b",
            **options,
        )
        self.local_keys = sliding_cache(
            *(f"{prefix}.local_keys", d, shape.sliding_window, dtype, rounding.record(Record.FP8)),
            rounding.before_the_store(Record.FP8),
        )

    def load_shard(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        """Copy this rank's heads or groups, which are contiguous along dim 0 of the checkpoint's tensor."""
        rows = weight.shape[0] // get_tensor_model_parallel_world_size()
        mine = weight[get_tensor_model_parallel_rank() * rows :][:rows]
        own = parameter.data.view(torch.uint8) if mine.dtype == torch.uint8 else parameter.data  # codes are bytes
        own.copy_(mine.view_as(parameter))

    def pack_weights(self) -> None:
        self.packed_wo_a = ready_for_kernels(Fp8Weight(self.wo_a.data.view(torch.uint8), self.wo_a_sf.data))

    def project(self, attended: torch.Tensor) -> torch.Tensor:
        """Grouped low-rank output projection. attended: [num_tokens, num_heads, head_dim], rounded for a product."""
        grouped = attended.reshape(attended.shape[0], self.num_groups, -1)
        weight = self.packed_wo_a if self.packed else self.wo_a
        low_rank = grouped_linear(grouped, weight, attended.dtype, self.round_activations).flatten(1)
        return tensor_model_parallel_all_reduce(self.wo_b(low_rank))
