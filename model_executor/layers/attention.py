"""V4.1 attention: a sliding window of local keys and the selected entries of global memory, under one softmax."""

import torch
from torch import nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

from deepinfer_plugin.kernels.grouped_linear import grouped_linear
from deepinfer_plugin.kernels.packed_weights import Fp8Weight
from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.kernels.rms_norm import rms_norm
from deepinfer_plugin.kernels.rope import rope
from deepinfer_plugin.kernels.sparse_attention import sparse_attention
from deepinfer_plugin.kernels.streams import beside, join
from deepinfer_plugin.model_executor.caches.layers import sliding_cache
from deepinfer_plugin.model_executor.caches.metadata import Step
from deepinfer_plugin.model_executor.layers.compressor import Compressor
from deepinfer_plugin.model_executor.layers.indexer import Indexer, Selection
from deepinfer_plugin.model_executor.layers.linear import (
    LinearFormat,
    PackedByLayer,
    fp8_parameters,
    ready_for_kernels,
    weight_dtype,
)
from deepinfer_plugin.model_executor.layers.rotary import Rotation
from deepinfer_plugin.model_executor.layers.rounding import Rounding
from deepinfer_plugin.model_executor.models.shape import ModelShape


class Attention(nn.Module):
    """Weights: `wqkv_a` (wq_a and wkv of the checkpoint), `q_norm`, `wq_b`, `kv_norm`, `attn_sink`, `wo_a`, `wo_b`.

    Heads and output groups are sharded over tensor-parallel ranks; latents, local keys, compressor and indexer are
    replicated. Source: model specification, sections 2.4 and 2.7.
    """

    def __init__(
        self,
        shape: ModelShape,
        layer: int,
        compressors: dict[int, Compressor],
        dtype: torch.dtype,
        rounding: Rounding,
        packed: bool,
        prefix: str,
    ) -> None:
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
        self.ratio = shape.ratio(layer)

        fp8 = LinearFormat(is_fp8=True, packed=packed)
        partial = LinearFormat(is_fp8=True, out_dtype=torch.float32, packed=packed)
        options = {"bias": False, "return_bias": False}
        self.wqkv_a = ReplicatedLinear(
            shape.hidden_size, shape.q_lora_rank + d, quant_config=fp8, prefix=f"{prefix}.wqkv_a", **options
        )
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

        kind, source = shape.kind(layer), shape.kv_source(layer)
        if kind == "full":
            self.compressor = Compressor(shape, layer, dtype, rounding, packed, f"{prefix}.compressor")
            compressors[layer] = self.compressor
        # a tuple: the source is another layer's module, not a child of this one
        self._source = tuple([] if source is None else [compressors[source]])
        if kind in ("full", "reindex"):
            self.indexer = Indexer(shape, layer, self._source[0], rounding, packed, f"{prefix}.indexer")
        self.owns_entries, self.selects = kind == "full", kind in ("full", "reindex")

    def load_shard(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        """Copy this rank's heads or groups, which are contiguous along dim 0 of the checkpoint's tensor."""
        rows = weight.shape[0] // get_tensor_model_parallel_world_size()
        mine = weight[get_tensor_model_parallel_rank() * rows :][:rows]
        own = parameter.data.view(torch.uint8) if mine.dtype == torch.uint8 else parameter.data  # codes are bytes
        own.copy_(mine.view_as(parameter))

    def pack_weights(self) -> None:
        self.packed_wo_a = ready_for_kernels(Fp8Weight(self.wo_a.data.view(torch.uint8), self.wo_a_sf.data))

    def forward(
        self,
        hidden_states: torch.Tensor,
        rounded: torch.Tensor,
        step: Step | None,
        rotation: Rotation,
        selection: Selection,
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same in fp32, not rounded. rounded: the input for products.

        Without a step (profiling) the caches are neither read nor written.
        """
        cos_sin = rotation.of(self.ratio)
        query_latent, kv = self.wqkv_a(rounded).split((self.q_lora_rank, self.head_dim), dim=1)
        query_latent = rms_norm(query_latent, self.q_norm, self.eps, self.round_activations)
        with beside(kv.device):
            if step is not None:
                self.local_keys.store_key(kv, self.kv_norm, self.eps, cos_sin, step.slots(self.local_keys))
                if self.owns_entries:
                    self.compressor(hidden_states, step, rotation)
                if self.selects:
                    self.indexer(query_latent, hidden_states, step, rotation, selection)
        query = rope(self.wq_b(query_latent).view(-1, self.num_heads, self.head_dim), cos_sin)
        join(kv.device)

        attended = query
        if step is not None:
            attended = sparse_attention(
                query,
                step.pages(self.local_keys),
                step.positions,
                self.window,
                step.pages(self._source[0].entries) if self._source else None,
                selection.entries if self._source else None,
                self.attn_sink,
                self.scale,
            )
        return self._project(rope(attended, cos_sin, True, self.round_activations))

    def _project(self, attended: torch.Tensor) -> torch.Tensor:
        """Grouped low-rank output projection. attended: [num_tokens, num_heads, head_dim], rounded for a product."""
        grouped = attended.reshape(attended.shape[0], self.num_groups, -1)
        weight = self.packed_wo_a if self.packed else self.wo_a
        low_rank = grouped_linear(grouped, weight, attended.dtype, self.round_activations).flatten(1)
        return tensor_model_parallel_all_reduce(self.wo_b(low_rank))
