"""The two heads of a draft: which token follows the one before it (Markov), and how sure that is (confidence)."""

import torch
from torch import nn
from torch.nn.functional import embedding
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from deepinfer_plugin.kernels.linear import linear
from deepinfer_plugin.model_executor.layers.linear import LinearFormat, weight_dtype
from deepinfer_plugin.model_executor.models.shape import ModelShape


class MarkovHead(nn.Module):
    """Weights: `embed` [vocab_size, rank], replicated; `head` [vocab_size, rank], sharded over the vocabulary.

    Source: model specification, section 6.4.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, packed: bool, prefix: str) -> None:
        super().__init__()
        rank = shape.dspark_markov_rank
        self.embed = nn.Parameter(torch.empty(shape.vocab_size, rank, dtype=dtype), requires_grad=False)
        self.head = ParallelLMHead(
            shape.vocab_size,
            rank,
            params_dtype=weight_dtype(packed),
            quant_config=LinearFormat(is_fp8=False, out_dtype=torch.float32, packed=packed),
            prefix=f"{prefix}.head",
        )
        self.logits_processor = LogitsProcessor(shape.vocab_size)

    def forward(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits to add, fp32 [n, vocab_size], and the embedding [n, rank] of the tokens before: int64 [n]."""
        before = embedding(previous, self.embed)
        return self.logits_processor(self.head, before), before


class ConfidenceHead(nn.Module):
    """Weights: `proj` [1, hidden_size + rank]. Source: model specification, sections 6.4 and 6.5."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.hidden_size + shape.dspark_markov_rank
        self.proj = nn.Parameter(torch.empty(1, width, dtype=torch.float32), requires_grad=False)

    def forward(self, hidden_states: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The logit of the chance that a draft is accepted if all before it are: fp32 [n].

        hidden_states: [n, hidden_size], before the norm; before: [n, rank], of the token before the draft.
        """
        return linear(torch.cat([hidden_states, before], 1), self.proj, torch.float32).squeeze(1)
