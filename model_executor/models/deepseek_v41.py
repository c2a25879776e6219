"""DeepSeek-V4.1-Flash for vLLM: embedding, layers, head. Wiring only; one class for every device and model runner."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn
from transformers.utils.hub import cached_file
from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.sequence import IntermediateTensors
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

from deepinfer_plugin.kernels.dispatch import force
from deepinfer_plugin.model_executor.caches.grouping import group_caches
from deepinfer_plugin.model_executor.caches.metadata import Step
from deepinfer_plugin.model_executor.config import DeepInferConfig
from deepinfer_plugin.model_executor.layers.compressor import Compressor
from deepinfer_plugin.model_executor.layers.decoder_layer import DecoderLayer
from deepinfer_plugin.model_executor.layers.engram import NgramHistory
from deepinfer_plugin.model_executor.layers.hyper_connection import StreamState
from deepinfer_plugin.model_executor.layers.indexer import Selection
from deepinfer_plugin.model_executor.layers.linear import LinearFormat, weight_dtype
from deepinfer_plugin.model_executor.layers.rotary import RotaryTables
from deepinfer_plugin.model_executor.models.build import BuildOptions
from deepinfer_plugin.model_executor.models.shape import ModelShape
from deepinfer_plugin.model_executor.models.weights import BACKBONE, WeightLoader

logger = init_logger(f"vllm.{__name__}")

# (features of the rows, the step, cos and sin of window-only layers): who drafts reads them, see `forward`
FeatureReader = Callable[[torch.Tensor, Step, torch.Tensor], None]


class DeepseekV41ForCausalLM(nn.Module):
    """The text model. Weights are named as in the checkpoint (model specification, section 5), merged where
    `models/weights.py` says so.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        shape = self.shape = ModelShape.from_hf_config(model_config.hf_config)
        ours = DeepInferConfig.from_vllm(vllm_config)
        for op, module in ours.force_kernels.items():
            force(op, module)
        build = BuildOptions.from_vllm(vllm_config)
        dtype, rounding, packed = build.dtype, build.rounding, build.packed
        self.feature_reader: FeatureReader | None = None

        self.embed = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size)
        self.rotary = RotaryTables(shape, model_config.max_model_len)
        first_engram = shape.engram_layer_ids[0]
        self.history = NgramHistory(shape, tokenizer_file(model_config), f"layers.{first_engram}.engram")
        compressors: dict[int, Compressor] = {}
        self.layers = nn.ModuleList(
            DecoderLayer(shape, n, compressors, dtype, rounding, build.expert_parallel, packed, f"layers.{n}")
            for n in range(shape.num_hidden_layers)
        )
        self.norm = nn.Parameter(torch.empty(shape.hidden_size, dtype=dtype), requires_grad=False)
        head = LinearFormat(is_fp8=False, out_dtype=torch.float32, packed=packed)
        self.head = ParallelLMHead(
            shape.vocab_size, shape.hidden_size, params_dtype=weight_dtype(packed), quant_config=head, prefix="head"
        )
        self.logits_processor = LogitsProcessor(shape.vocab_size)
        logger.info_once("%s.%s built: %d layers, %s", __name__, type(self).__qualname__, len(self.layers), rounding)

    @classmethod
    def get_kv_cache_groups(
        cls, vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]
    ) -> list[KVCacheGroupSpec]:
        """Which caches share a block table. vLLM 0.33 asks; 0.32 groups by itself, into wider blocks."""
        return group_caches(kv_cache_spec)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]."""
        return self.embed(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """The normalised output of the last layer, [num_tokens, hidden_size].

        input_ids: [num_tokens]; positions: int64 [num_tokens], the rows' token indices in their requests.
        `feature_reader`, if there is one, is called with the mean of the streams before the attention of each layer
        that drafts are conditioned on: [num_tokens, layers * hidden_size].

        Raises:
            ValueError: embeddings without token ids, which Engram's n-grams cannot be made from.
        """
        if input_ids is None:
            raise ValueError("V4.1: token ids are needed for Engram, got prompt embeddings only")
        step = Step.current(positions)
        rotation = self.rotary(positions if step is None else step.positions)
        class_ids = self.history(input_ids, step)
        is_image = input_ids == self.shape.image_token_id
        embedding = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        state, selection = StreamState.start(embedding, self.shape.hc_mult), Selection()
        features: list[torch.Tensor] = []
        for n, layer in enumerate(self.layers):
            seen = features if self.feature_reader and n in self.shape.dspark_target_layer_ids else None
            layer(state, step, rotation, selection, class_ids, is_image, seen)
        if self.feature_reader and step is not None:
            self.feature_reader(torch.cat(features, 1), step, rotation.window)
        return state.normalised(self.norm, self.shape.rms_norm_eps, False)[0]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[num_rows, hidden_size] -> fp32 [num_rows, vocab_size]; None on ranks that do not sample."""
        return self.logits_processor(self.head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the parameters from checkpoint tensors in any order; return the parameters' names.

        Raises:
            ValueError: a tensor is missing, unknown, or of another shape or dtype.
        """
        return WeightLoader(self, self.shape, BACKBONE).load(weights)


def tokenizer_file(model_config: ModelConfig) -> Path:
    """The `tokenizer.json` whose vocabulary Engram's classes are made from: local, or from the Hugging Face cache.

    Raises:
        ValueError: the tokenizer comes without that file.
    """
    name = model_config.tokenizer
    try:
        return Path(cached_file(name, "tokenizer.json", revision=model_config.tokenizer_revision))
    except OSError as error:
        raise ValueError(f"Engram: token classes are made from tokenizer.json, which {name} does not have") from error
