"""The numbers of one V4.1 checkpoint, validated once, and what follows: layer kinds, and who shares whose memory."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from deepinfer_plugin.kernels.rope_table import YarnScaling

ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_TYPE = "deepseek_v41"

# what the network is defined for; anything else is another network (model specification, section 1.2, rules 4 and 5)
FIXED = {
    "hidden_act": "silu",
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "attention_bias": False,
    "attention_dropout": 0,
    "tie_word_embeddings": False,
    # keys that the released file leaves out, with the value it is trained for
    "hc_shifted": True,
    "use_fp4_sparse_kv": True,
    "dspark_target_attn_input": True,
}
FIXED_QUANTIZATION = {
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


@dataclass(frozen=True)
class VisionShape:
    """Sizes of the vision encoder; names as in `vision_config` of the checkpoint."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes and topology of a V4.1 model; names as in `text_config` of the checkpoint.

    Source: model specification, sections 1.2 and 1.3.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    max_position_embeddings: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnScaling
    rms_norm_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    image_token_id: int
    vision: VisionShape

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "ModelShape":
        """From the content of a checkpoint's `config.json`.

        Raises:
            ValueError: a field is missing, or has a value that V4.1 is not defined for.
        """
        text = {**config, **config.get("text_config", {})}
        return cls._build(text, text.get("rope_scaling") or {}, config.get("vision_config") or {})

    @classmethod
    def from_hf_config(cls, config: Any) -> "ModelShape":
        """From vLLM's flattened configuration object of this model type."""
        flat = dict(vars(config))
        vision = {
            "num_hidden_layers": flat.get("vision_n_layers"),
            "hidden_size": flat.get("vision_dim"),
            "intermediate_size": flat.get("vision_inter_dim"),
            "patch_size": flat.get("vision_patch_size"),
            "downsample_ratio": flat.get("vision_downsample_ratio"),
        }
        return cls._build(flat, getattr(config, "rope_parameters", None) or {}, vision)

    @classmethod
    def _build(cls, text: Mapping[str, Any], rope: Mapping[str, Any], vision: Mapping[str, Any]) -> "ModelShape":
        _require_fixed("text_config", text, FIXED)
        _require_fixed("quantization_config", text.get("quantization_config") or {}, FIXED_QUANTIZATION)
        _require_fixed("text_config", text, {"index_k_source_layer_ids": text.get("kv_source_layer_ids")})
        values = {f.name: text.get(f.name) for f in fields(cls)}
        values["yarn"] = YarnScaling(**_pick("rope_scaling", rope, YarnScaling))
        values["vision"] = VisionShape(**_pick("vision_config", vision, VisionShape))
        if missing := [name for name, value in values.items() if value is None]:
            raise ValueError(f"config.json: V4.1 needs {', '.join(missing)} in text_config, found none")
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        shape = cls(**arguments)
        shape._check_topology()
        return shape

    @property
    def decoder_start(self) -> int:
        """The first layer of the decoder half: the first one whose compression ratio is 1."""
        return self.compress_ratios.index(1)

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry in `layer`'s global memory; 0 where it has none."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed entries `layer` reads; None for a window-only layer."""
        return max(s for s in self.kv_source_layer_ids if s <= layer) if self.ratio(layer) else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose top-k `layer` attends to; None for a window-only layer."""
        return max(s for s in self.index_source_layer_ids if s <= layer) if self.ratio(layer) else None

    def kind(self, layer: int) -> str:
        """`window`, `full`, `reindex` or `reuse` (model specification, section 1.2)."""
        if not self.ratio(layer):
            return "window"
        if layer in self.kv_source_layer_ids:
            return "full"
        return "reindex" if layer in self.index_source_layer_ids else "reuse"

    def searches_candidates(self, layer: int) -> bool:
        """Whether `layer`'s indexer searches only the candidate blocks of the candidate source."""
        return layer in self.index_source_layer_ids and layer > self.candidate_source_layer_id

    def _check_topology(self) -> None:
        layers, total = self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers
        pool = self.candidate_topk_blocks * self.candidate_block_size
        backbone = self.compress_ratios[:layers]
        rules = {
            f"compress_ratios must have {total} entries of 0, 1 or 2": len(self.compress_ratios) == total
            and set(self.compress_ratios) <= {0, 1, 2},
            "compress_ratios must have a first 1 (the decoder start), and draft blocks must have 0": 1 in backbone
            and not any(self.compress_ratios[layers:]),
            "kv_source_layer_ids must be index sources too": set(self.kv_source_layer_ids)
            <= set(self.index_source_layer_ids),
            "sources must have a ratio": all(0 <= n < layers and backbone[n] for n in self.index_source_layer_ids),
            "engram_num_embeddings must have one entry per Engram layer": len(self.engram_num_embeddings)
            == len(self.engram_layer_ids)
            > 0,
            "every layer with a ratio must have a KV and an index source before it": all(
                not q or min(self.kv_source_layer_ids, default=total) <= layer for layer, q in enumerate(backbone)
            ),
            "candidate_source_layer_id must be an index source": self.candidate_source_layer_id
            in self.index_source_layer_ids,
            "candidate_block_size must be 8 or 16": self.candidate_block_size in (8, 16),
            "candidate_topk_blocks must be a multiple of 8, at most 4096": self.candidate_topk_blocks % 8 == 0
            and self.candidate_topk_blocks <= 4096,
            "candidate blocks must hold at least index_topk entries": pool >= self.index_topk,
            "n_shared_experts must be at least 1": self.n_shared_experts >= 1,
            "num_attention_heads must be a multiple of o_groups": self.num_attention_heads % self.o_groups == 0,
            "engram_layer_ids must lie before the decoder start": 1 in backbone
            and all(layer < self.decoder_start for layer in self.engram_layer_ids),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if not broken:  # asks for sources, which exist only if the rules above hold
            mixed = [n for n in range(layers) if self.ratio(n) and self.ratio(self.kv_source(n) or 0) != self.ratio(n)]
            if mixed:
                broken.append(f"a layer must have its KV source's ratio, layers {mixed} have not")
        if broken:
            raise ValueError(f"config.json: {'; '.join(broken)}")


def _pick(subject: str, values: Mapping[str, Any], cls: type) -> dict[str, Any]:
    names = [f.name for f in fields(cls)]
    if missing := [name for name in names if values.get(name) is None]:
        raise ValueError(f"config.json: {subject} needs {', '.join(missing)}, found only {sorted(values)}")
    return {name: values[name] for name in names}


def _require_fixed(subject: str, values: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    for name, want in fixed.items():
        if values.get(name, want) != want:
            raise ValueError(f"config.json: {subject}.{name} must be {want!r} for V4.1, found {values[name]!r}")
