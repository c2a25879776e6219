"""The mixture of experts of every V4.1 layer, with the shared expert that every token passes."""

import torch
from torch import nn
from vllm.distributed import (
    get_ep_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

from deepinfer_plugin.kernels.linear import linear
from deepinfer_plugin.kernels.moe_experts import moe_experts
from deepinfer_plugin.kernels.moe_gate import moe_gate
from deepinfer_plugin.kernels.packed_weights import Fp4Weight
from deepinfer_plugin.kernels.quant_formats import BLOCK_SIZE
from deepinfer_plugin.kernels.streams import beside, join
from deepinfer_plugin.kernels.swiglu import swiglu
from deepinfer_plugin.model_executor.layers.linear import (
    LinearFormat,
    PackedByLayer,
    fp4_parameters,
    ready_for_kernels,
    weight_dtype,
)
from deepinfer_plugin.model_executor.models.shape import ModelShape


class Gate(nn.Module):
    """Weights: `weight`, and the selection biases for text (`bias`) and for image tokens (`bias_vl`)."""

    def __init__(self, shape: ModelShape, packed: bool) -> None:
        super().__init__()
        experts = shape.n_routed_experts
        weight = torch.empty(experts, shape.hidden_size, dtype=weight_dtype(packed))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(experts, dtype=torch.float32), requires_grad=False)
        self.bias_vl = nn.Parameter(torch.empty(experts, dtype=torch.float32), requires_grad=False)
        self.top_k, self.scaling = shape.num_experts_per_tok, shape.routed_scaling_factor

    def forward(
        self, hidden_states: torch.Tensor, is_image: torch.Tensor, is_padding: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = linear(hidden_states, self.weight, torch.float32)
        return moe_gate(logits, self.bias, self.bias_vl, is_image, self.top_k, self.scaling, is_padding)


class Experts(nn.Module):
    """Weights: `w13` [num_local, 2 * intermediate_size, hidden_size], `w2` [num_local, hidden_size, intermediate_size];
    packed: their bytes, two channels in each, and `w13_sf`, `w2_sf`.

    With expert parallelism a rank holds a contiguous range of whole experts; otherwise a slice of every expert.
    """

    def __init__(self, shape: ModelShape, expert_parallel: bool, packed: bool) -> None:
        super().__init__()
        tp_size, experts = get_tensor_model_parallel_world_size(), shape.n_routed_experts
        self.width, self.start, self.num_local, self.slice_index = shape.moe_intermediate_size, 0, experts, 0
        if expert_parallel:
            group = get_ep_group()
            if experts % group.world_size:
                raise ValueError(
                    f"expert parallelism: its size must divide n_routed_experts = {experts}, got {group.world_size}"
                )
            self.num_local = experts // group.world_size
            self.start = group.rank_in_group * self.num_local
        else:
            if self.width % (tp_size * BLOCK_SIZE):
                raise ValueError(
                    f"tensor parallelism: each rank needs a multiple of {BLOCK_SIZE} of moe_intermediate_size = "
                    f"{self.width}, got size {tp_size}; --enable-expert-parallel keeps experts whole"
                )
            self.width //= tp_size
            self.slice_index = get_tensor_model_parallel_rank()
        hidden, self.packed = shape.hidden_size, packed
        if packed:
            self.quant_method = PackedByLayer()
        for name, rows, columns in (("w13", 2 * self.width, hidden), ("w2", hidden, self.width)):
            if packed:
                codes, sf = fp4_parameters(self.num_local, rows, columns)
                self.register_parameter(name, codes)
                self.register_parameter(f"{name}_sf", sf)
            else:
                decoded = torch.empty(self.num_local, rows, columns, dtype=weight_dtype(packed))
                self.register_parameter(name, nn.Parameter(decoded, requires_grad=False))

    def load(self, expert: int, name: str, weight: torch.Tensor, suffix: str = "") -> None:
        """Copy this rank's part of `name` (`w1`, `w2` or `w3`) of `expert`.

        weight: [out, in], decoded; or of a packed expert its codes, or with suffix `_sf` its scales.
        """
        local = expert - self.start
        if not 0 <= local < self.num_local:
            return
        parameter = getattr(self, ("w2" if name == "w2" else "w13") + suffix).data[local]
        if name == "w2":
            columns = parameter.shape[1]
            parameter.copy_(weight[:, self.slice_index * columns :][:, :columns])
        else:
            row = 0 if name == "w1" else self.width
            parameter[row : row + self.width].copy_(weight[self.slice_index * self.width :][: self.width])

    def weights(self) -> tuple[torch.Tensor | Fp4Weight, torch.Tensor | Fp4Weight]:
        """w13 and w2, as `moe_experts` takes them."""
        return self.packed_weights if self.packed else (self.w13, self.w2)

    def pack_weights(self) -> None:
        w13, w2 = Fp4Weight(self.w13.data, self.w13_sf.data), Fp4Weight(self.w2.data, self.w2_sf.data)
        self.packed_weights = ready_for_kernels(w13), ready_for_kernels(w2)


class MoE(nn.Module):
    """Weights: `gate`, `experts`, and the shared expert's `gate_up_proj` (w1 and w3) and `down_proj` (w2).

    Source: model specification, section 2.9.
    """

    def __init__(
        self, shape: ModelShape, expert_parallel: bool, round_activations: bool, packed: bool, prefix: str
    ) -> None:
        super().__init__()
        self.gate, self.experts = Gate(shape, packed), Experts(shape, expert_parallel, packed)
        self.limit, self.round_activations = shape.swiglu_limit, round_activations
        width = shape.moe_intermediate_size * shape.n_shared_experts
        options = {"bias": False, "return_bias": False}
        self.gate_up_proj = MergedColumnParallelLinear(
            shape.hidden_size,
            [width, width],
            quant_config=LinearFormat(is_fp8=True, out_dtype=torch.float32, packed=packed),
            prefix=f"{prefix}.shared_experts.gate_up_proj",
            **options,
        )
        self.down_proj = RowParallelLinear(
            width,
            shape.hidden_size,
            quant_config=LinearFormat(is_fp8=True, out_dtype=torch.float32, packed=packed),
            prefix=f"{prefix}.shared_experts.down_proj",
            reduce_results=False,
            **options,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        rounded: torch.Tensor,
        is_image: torch.Tensor,
        is_padding: torch.Tensor | None,
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] -> fp32, not rounded. rounded: the input for products; is_image, is_padding:
        [num_tokens]; padding rows visit no expert."""
        with beside(rounded.device):
            topk_ids, topk_weights = self.gate(hidden_states, is_image, is_padding)
        shared = self.down_proj(swiglu(self.gate_up_proj(rounded), self.limit, None, self.round_activations))
        join(rounded.device)
        routed = (topk_ids, topk_weights, self.experts.start, self.limit, self.round_activations)
        return tensor_model_parallel_all_reduce(moe_experts(rounded, *self.experts.weights(), *routed, shared))
