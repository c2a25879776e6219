"""Writes tiny checkpoints: V4.1's own format and every code path in a few megabytes, with random or trained weights.

The folder can be served like the released model. Equal seeds give equal bytes.
"""

import json
import math
import shutil
import zlib
from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from deepinfer_plugin.kernels.quant_formats import encode_fp4, encode_fp8_blocks, encode_fp8_rows
from deepinfer_plugin.model_executor.models.checkpoint import Entry, Format, entries, stored
from deepinfer_plugin.model_executor.models.shape import ModelShape
from deepinfer_plugin.model_executor.models.tiny_tokenizer import BOS, EOS, PAD, tiny_tokenizer

CONFIG = Path(__file__).with_name("tiny_config.json")
# Text sizes of the checkpoint on which GPU kernels are compared: those that vLLM's own V4.1 insists on, and few layers.
PARITY = {
    "hidden_size": 1024,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_groups": 8,
    "o_lora_rank": 128,
    "sliding_window": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_topk_blocks": 64,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "max_position_embeddings": 8192,
}
SIZES = {"tiny": {}, "parity": PARITY}
TRAINED = Path(__file__).with_name("tiny_trained")  # made by examples/train_tiny

ENCODERS: dict[Format, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    Format.BF16: lambda x: (x.bfloat16(),),
    Format.F32: lambda x: (x,),
    Format.FP8_BLOCKS: encode_fp8_blocks,
    Format.FP8_ROWS: encode_fp8_rows,
    Format.FP4: encode_fp4,
}

# (name pattern, mean, standard deviation); the first that fits counts. All other matrices: 1 / sqrt(in-features).
# Norms, sinks and hc_*_scale are the model specification's. The rest keeps activations near 1 and differences visible:
# hc_*_fn makes the mixes of a token move by about 0.5 before their sigmoid, in spite of their small scale, and
# the head gives logits of deviation 4, so that the best token leads by about 1.
HC_FN_GAIN = 50.0
HEAD_GAIN = 4.0
DISTRIBUTIONS: tuple[tuple[str, float, float], ...] = (
    ("*norm*.weight", 1.0, 0.0),
    ("*.attn_sink", 0.0, 0.0),
    ("*.hc_*_scale", 0.01, 0.0),
    ("*.gate.bias*", 0.0, 0.3),
    ("*.bias", 0.0, 0.1),
    ("*.engram.[qk]_weight", 1.0, 0.1),
    ("*embed.weight", 0.0, 1.0),
    ("*.engram.embed", 0.0, 1.0),
    ("image_*", 0.0, 1.0),
)


def tiny_config(size: str = "tiny") -> dict[str, Any]:
    """The content of `config.json` of one of SIZES."""
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    config["text_config"] |= SIZES[size]
    return config


def write_tiny(folder: Path, seed: int = 0, size: str = "tiny") -> None:
    """Fill `folder` with a random checkpoint: two shards with their index, tokenizer, configuration.

    Args:
        folder: made if it does not exist; files of the same names are overwritten.
        seed: of the weights, 0 or more; configuration and tokenizer do not depend on it.
        size: "tiny", 3 MB, or "parity", 170 MB: the same layers with the heads of the released model, for GPU kernels.

    Raises:
        ValueError: `seed` is negative.

    Source: model specification, section 9.
    """
    if seed < 0:
        raise ValueError(f"tiny checkpoint: seed must be 0 or more, got {seed}")
    config = tiny_config(size)
    shape = ModelShape.from_json(config)
    write_checkpoint(folder, config, tiny_tokenizer(), lambda entry: _numbers(entry, shape, seed))


def write_trained(folder: Path) -> None:
    """Fill `folder` with the trained tiny checkpoint of this package; files of the same names are overwritten."""
    shutil.copytree(TRAINED, folder, dirs_exist_ok=True)


def write_checkpoint(
    folder: Path, config: dict[str, Any], tokenizer: Tokenizer, numbers: Callable[[Entry], torch.Tensor]
) -> None:
    """Fill `folder` with a checkpoint: two shards with their index, tokenizer, configuration.

    Args:
        folder: made if it does not exist; files of the same names are overwritten.
        config: content of `config.json`.
        tokenizer: saved as it is.
        numbers: the fp32 values of each array; they are encoded in the array's format.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for entry in entries(ModelShape.from_json(config)):
        parts = ENCODERS[entry.format](numbers(entry))
        tensors.update(zip((spec.name for spec in stored(entry)), parts, strict=True))
    _write_shards(folder, tensors)
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {f"{name}_id": config[f"{name}_id"] for name in special})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["text_config"]["max_position_embeddings"],
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def _numbers(entry: Entry, shape: ModelShape, seed: int) -> torch.Tensor:
    """fp32 values of one array; they depend on its name and on nothing else that is written."""
    if fnmatchcase(entry.name, "*.hc_*_base"):
        return mix_base(int(entry.name.split(".")[1]), shape.hc_mult)
    rng = np.random.default_rng([seed, zlib.crc32(entry.name.encode())])
    normal = torch.from_numpy(rng.standard_normal(entry.shape, dtype=np.float32))
    for pattern, mean, deviation in DISTRIBUTIONS:
        if fnmatchcase(entry.name, pattern):
            return mean + deviation * normal
    gain = HC_FN_GAIN if fnmatchcase(entry.name, "*.hc_*_fn") else HEAD_GAIN if entry.name == "head.weight" else 1.0
    return normal * (gain / math.sqrt(entry.shape[-1]))


def mix_base(layer: int, hc_mult: int) -> torch.Tensor:
    """A layer reads mostly stream `layer % hc_mult`, and streams mostly keep to themselves."""
    pre = torch.full((hc_mult,), -3.0)
    pre[layer % hc_mult] = 3.0
    comb = torch.eye(hc_mult) * 6.0 - 3.0
    return torch.cat([pre, torch.zeros(hc_mult), comb.flatten()])


def _write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Two files of about equal size. The border parts a weight from its factors: the hardest place for a loader."""
    names = list(tensors)
    sizes = [tensor.nbytes for tensor in tensors.values()]
    total = sum(sizes)
    border = next(n for n, end in enumerate(accumulate(sizes)) if end > total / 2 and names[n].endswith(".scale"))
    shards = [names[:border], names[border:]]
    weight_map = {}
    for n, shard in enumerate(shards, 1):
        file = f"model-{n:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensors[name].contiguous() for name in shard}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
