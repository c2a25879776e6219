"""Engram: a memory of hashed n-grams, added to the streams before some layers.

Token history is a cache like any other: the last tokens of a request, so that chunks, prefix hits and preemption see
the same n-grams.
"""

from pathlib import Path

import torch
from torch import nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear

from deepinfer_plugin.kernels.engram_gate import engram_gate
from deepinfer_plugin.kernels.engram_lookup import engram_hash, engram_lookup
from deepinfer_plugin.model_executor.caches.layers import sliding_cache
from deepinfer_plugin.model_executor.caches.metadata import Step
from deepinfer_plugin.model_executor.layers.linear import LinearFormat, scales
from deepinfer_plugin.model_executor.models.engram_vocabulary import (
    class_table,
    engram_multipliers,
    engram_offsets,
    engram_primes,
)
from deepinfer_plugin.model_executor.models.shape import ModelShape


class NgramHistory(nn.Module):
    """Owns the recent tokens of every request and turns a step's rows into classes of tokens p, p-1, …

    Source: model specification, section 2.8 (a) and (d).
    """

    def __init__(self, shape: ModelShape, tokenizer_file: Path, prefix: str) -> None:
        super().__init__()
        self.length, self.image_token_id = shape.engram_max_ngram_size, shape.image_token_id
        self.register_buffer("classes", class_table(tokenizer_file, shape), persistent=False)
        self.pad_token_id = shape.engram_pad_token_id
        self.register_buffer("look_back", torch.arange(self.length), persistent=False)
        self.tokens = sliding_cache(f"{prefix}.tokens", 1, self.length, torch.int32)

    def forward(self, token_ids: torch.Tensor, step: Step | None) -> torch.Tensor:
        """Class ids of tokens p, p-1, …: int64 [num_tokens, engram_max_ngram_size].

        Before the start of the request, and from the first image token backwards, the pad token's class.
        """
        if step is None:
            return self.classes[token_ids.unsqueeze(1).expand(-1, self.length)]
        self.tokens.store(token_ids.unsqueeze(1), step.slots(self.tokens))
        places = step.positions.unsqueeze(1) - self.look_back
        history = step.pages(self.tokens).gather_states(places).squeeze(-1)
        ends = (places < 0) | (history == self.image_token_id)
        history = history.masked_fill(ends.cumsum(1) > 0, self.pad_token_id)
        return self.classes[history.long()]


class Engram(nn.Module):
    """Weights: `table` and `table_sf` (FP8 rows, this rank's range), `wkv` (FP8), `q_weight`, `k_weight`.

    The table stays packed: it is the largest tensor of the model, and a step reads a few rows of it.
    """

    def __init__(self, shape: ModelShape, layer: int, dtype: torch.dtype, packed: bool, prefix: str) -> None:
        super().__init__()
        index = shape.engram_layer_ids.index(layer)
        primes = engram_primes(shape)[index]
        multipliers = engram_multipliers(layer, shape.engram_compressed_vocab_size, shape.engram_max_ngram_size)
        self.register_buffer("primes", primes, persistent=False)
        self.register_buffer("offsets", engram_offsets(primes), persistent=False)
        self.register_buffer("multipliers", multipliers, persistent=False)
        self.eps, self.hc_mult, self.hidden_size = shape.rms_norm_eps, shape.hc_mult, shape.hidden_size

        tp_size, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        num_rows, width = shape.engram_num_embeddings[index], shape.engram_head_dim
        rows_per_rank = -(-num_rows // tp_size)
        self.row_start = rank * rows_per_rank
        local = max(0, min(rows_per_rank, num_rows - self.row_start))
        self.table = nn.Parameter(torch.empty(local, width, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.table_sf = scales(local, width // 32)
        self.wkv = ColumnParallelLinear(
            primes.numel() * width,
            (shape.hc_mult + 1) * shape.hidden_size,
            bias=False,
            gather_output=True,
            quant_config=LinearFormat(is_fp8=True, out_dtype=dtype, packed=packed),
            prefix=f"{prefix}.wkv",
            return_bias=False,
        )
        self.q_weight = nn.Parameter(torch.empty(shape.hc_mult, shape.hidden_size, dtype=dtype), requires_grad=False)
        self.k_weight = nn.Parameter(torch.empty(shape.hc_mult, shape.hidden_size, dtype=dtype), requires_grad=False)

    def load_rows(self, parameter: nn.Parameter, rows: torch.Tensor) -> None:
        """Copy this rank's range of the table's rows, byte for byte."""
        mine = rows[self.row_start : self.row_start + parameter.shape[0]]
        parameter.data.view(torch.uint8).copy_(mine.view(torch.uint8))

    def forward(self, streams: torch.Tensor, class_ids: torch.Tensor, is_image: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hc_mult, hidden_size] -> the same; rows of image tokens are returned as they are."""
        rows = engram_hash(class_ids, self.multipliers, self.primes, self.offsets)
        embedding = tensor_model_parallel_all_reduce(
            engram_lookup(rows, self.table, self.table_sf, self.row_start)
        )  # fp32; each row lies on one rank, the others add zero
        key_values = self.wkv(embedding).view(-1, self.hc_mult + 1, self.hidden_size)
        return engram_gate(streams, key_values, self.q_weight, self.k_weight, self.eps, is_image)
