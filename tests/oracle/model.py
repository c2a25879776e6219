"""V4.1's text network for one whole sequence in float64: no cache, no chunks, nothing of the product.

Source: model specification, sections 2.1 to 2.10.
"""

import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from tests.oracle.checkpoint import read_checkpoint
from tests.oracle.engram import classes_of, rows_of
from tests.oracle.quantisers import ROUND

Rounder = Callable[[str, torch.Tensor], torch.Tensor]


def no_rounding(kind: str, x: torch.Tensor) -> torch.Tensor:
    return x


def exact_rounding(kind: str, x: torch.Tensor) -> torch.Tensor:
    """kind: "activation" (inputs of FP8, FP4 products), "local_kv", "entry" (compressed) or "index" (keys, queries)."""
    return ROUND[kind](x)


class Oracle:
    """One checkpoint. `round` says what happens at each quantisation point; all else is float64."""

    def __init__(self, folder: Path, round: Rounder) -> None:
        self.config, self.weights = read_checkpoint(Path(folder))
        self.classes = classes_of(Path(folder) / "tokenizer.json")
        self.round = round

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float64 [len(tokens), vocab_size]."""
        with torch.no_grad():
            return _Sequence(self, tokens).logits()


def norm(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def sinkhorn(c: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """[T, m, m] -> nearly doubly stochastic: rows by softmax, then columns and rows in turn, columns last."""
    a = torch.softmax(c, 2) + eps
    a = a / (a.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        a = a / (a.sum(2, keepdim=True) + eps)
        a = a / (a.sum(1, keepdim=True) + eps)
    return a


def rope_frequencies(config: dict, scaled: bool) -> np.ndarray:
    """fp32, in the order of operations that the specification fixes."""
    width = config["qk_rope_head_dim"]
    theta = np.float32(config["compress_rope_theta" if scaled else "rope_theta"])
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    t = theta**exponent
    plain = np.float32(1) / t
    if not scaled:
        return plain
    yarn = config["rope_scaling"]

    def pair_that_turns(times: float) -> float:
        length = yarn["original_max_position_embeddings"]
        return width * math.log(length / (times * 2 * math.pi)) / (2 * math.log(config["compress_rope_theta"]))

    low = max(math.floor(pair_that_turns(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_that_turns(yarn["beta_slow"])), width - 1)
    span = np.float32(0.001 if low == high else high - low)
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - np.float32(low)) / span, 0, 1)
    keep = np.float32(1) - ramp
    return plain * keep + np.float32(1) / (np.float32(yarn["factor"]) * t) * (np.float32(1) - keep)


def rotate(x: torch.Tensor, positions: list[int], frequencies: np.ndarray, sign: int = 1) -> torch.Tensor:
    """Turn adjacent pairs of the last channels. x: [T, ..., C]; positions: one per row."""
    angle = torch.from_numpy(np.array(positions, np.float32)[:, None] * frequencies).double()
    angle = angle.view(len(positions), *[1] * (x.dim() - 2), len(frequencies)) * sign
    width = 2 * len(frequencies)
    left, pairs = x[..., :-width], x[..., -width:].unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    return torch.cat([left, turned.flatten(-2)], -1)


class _Sequence:
    """One evaluation: the sequence, and what earlier layers leave for later ones."""

    def __init__(self, oracle: Oracle, tokens: list[int]) -> None:
        self.c, self.w, self.round, self.classes = oracle.config, oracle.weights, oracle.round, oracle.classes
        self.tokens, self.positions = tokens, list(range(len(tokens)))
        self.is_image = [token == self.c["image_token_id"] for token in tokens]
        self.eps, self.m = self.c["rms_norm_eps"], self.c["hc_mult"]
        self.entries: torch.Tensor  # [num_entries, head_dim] of the nearest KV source
        self.keys: torch.Tensor  # [num_entries, index_head_dim]
        self.selected: list[list[int]]  # by token, of the nearest index source
        self.candidates: list[set[int]] | None = None
        self.features: list[torch.Tensor] = []  # what the draft blocks read, by target layer

    @cached_property
    def frequencies(self) -> dict[bool, np.ndarray]:
        return {scaled: rope_frequencies(self.c, scaled) for scaled in (False, True)}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w[f"{name}.weight"].T

    def logits(self) -> torch.Tensor:
        streams = self.w["embed.weight"][self.tokens].unsqueeze(1).repeat(1, self.m, 1)  # [T, m, D]
        mix = torch.zeros(len(self.tokens), self.m, dtype=torch.float64)
        mix[:, 0] = 1
        pending = None
        for layer in range(self.c["num_hidden_layers"]):
            for part, sublayer in (("attn", self.attention), ("ffn", self.experts)):
                streams = self.mixed(streams, pending)
                if part == "attn" and layer in self.c["engram_layer_ids"]:
                    streams = self.engram(layer, streams)
                if part == "attn" and layer in self.c["dspark_target_layer_ids"]:
                    self.features.append(streams.mean(1))
                pre, post, comb = self.coefficients(f"layers.{layer}.hc_{part}", streams)
                u = torch.einsum("ti,tic->tc", mix, streams)
                y = sublayer(layer, norm(u, self.w[f"layers.{layer}.{part}_norm.weight"], self.eps))
                mix, pending = pre, (post, comb, y)
        u = torch.einsum("ti,tic->tc", mix, self.mixed(streams, pending))
        return self.linear("head", norm(u, self.w["norm.weight"], self.eps))

    # hyper-connections, section 2.2

    def mixed(self, streams: torch.Tensor, pending: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
        if pending is None:
            return streams
        post, comb, y = pending
        return post.unsqueeze(2) * y.unsqueeze(1) + torch.einsum("tij,tic->tjc", comb, streams)

    def coefficients(self, name: str, streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
        m, base, scale = self.m, self.w[f"{name}_base"], self.w[f"{name}_scale"]
        v = streams.flatten(1)
        z = v @ self.w[f"{name}_fn"].T / (v.square().mean(1, keepdim=True) + self.eps).sqrt()
        a, b, c = z.split([m, m, m * m], 1)
        pre = torch.sigmoid(a * scale[0] + base[:m]) + self.c["hc_eps"]
        post = 2 * torch.sigmoid(b * scale[1] + base[m : 2 * m])
        comb = (c * scale[2] + base[2 * m :]).unflatten(1, (m, m))
        return pre, post, sinkhorn(comb, self.c["hc_sinkhorn_iters"], self.c["hc_eps"])

    # attention, sections 2.4 to 2.7

    def attention(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        c, name, ratio = self.c, f"layers.{layer}.attn", self.c["compress_ratios"][layer]
        heads, d, frequencies = c["num_attention_heads"], c["head_dim"], self.frequencies[ratio > 0]
        h8 = self.round("activation", h)
        qr = norm(self.linear(f"{name}.wq_a", h8), self.w[f"{name}.q_norm.weight"], self.eps)
        qr8 = self.round("activation", qr)
        q = rotate(self.linear(f"{name}.wq_b", qr8).unflatten(1, (heads, d)), self.positions, frequencies)
        kv = norm(self.linear(f"{name}.wkv", h8), self.w[f"{name}.kv_norm.weight"], self.eps)
        kv = self.round("local_kv", rotate(kv, self.positions, frequencies))
        if layer in c["kv_source_layer_ids"]:
            self.compress(name, ratio, h)
        if layer in c["index_source_layer_ids"]:
            self.select(name, layer, ratio, qr8, h)

        out, sink = torch.zeros_like(q), self.w[f"{name}.attn_sink"]
        for p in self.positions:
            keys = kv[max(0, p - c["sliding_window"] + 1) : p + 1]
            if ratio:
                keys = torch.cat([keys, self.entries[self.selected[p]]])
            scores = torch.cat([q[p] @ keys.T * d**-0.5, sink.unsqueeze(1)], 1)  # [heads, keys + sink]
            out[p] = torch.softmax(scores, 1)[:, :-1] @ keys
        out = self.round("activation", rotate(out, self.positions, frequencies, -1))
        groups, rank = c["o_groups"], c["o_lora_rank"]
        wo_a = self.w[f"{name}.wo_a.weight"].unflatten(0, (groups, rank))
        low = torch.einsum("tgk,grk->tgr", out.flatten(1).unflatten(1, (groups, -1)), wo_a)
        return self.linear(f"{name}.wo_b", self.round("activation", low.flatten(1)))

    def compress(self, name: str, ratio: int, h: torch.Tensor) -> None:
        """Global memory of a KV source: entry j pools tokens j*ratio .. j*ratio + ratio - 1, complete groups only."""
        n = len(self.tokens) // ratio
        v = self.linear(f"{name}.compressor.wkv", h)[: n * ratio].unflatten(0, (n, ratio))
        if ratio == 2:
            g = self.linear(f"{name}.compressor.wgate", h)[: n * ratio].unflatten(0, (n, ratio))
            pooled = (torch.softmax(g, 1) * v).sum(1)
        else:
            pooled = v.squeeze(1)
        latent = norm(pooled, self.w[f"{name}.compressor.norm.weight"], self.eps)
        first, frequencies = [j * ratio for j in range(n)], self.frequencies[True]
        self.entries = self.round("entry", rotate(latent, first, frequencies))
        key = norm(self.linear(f"{name}.indexer.wk", latent), self.w[f"{name}.indexer.k_norm.weight"], self.eps)
        self.keys = self.round("index", rotate(key, first, frequencies))

    def select(self, name: str, layer: int, ratio: int, qr8: torch.Tensor, h: torch.Tensor) -> None:
        """The entries that each token reads; at the candidate source also the blocks that later layers search."""
        c = self.c
        q = self.linear(f"{name}.indexer.wq_b", qr8).unflatten(1, (c["index_n_heads"], c["index_head_dim"]))
        q = self.round("index", rotate(q, self.positions, self.frequencies[True]))
        head_weights = self.linear(f"{name}.indexer.weights_proj", h)
        scores = torch.einsum("th,thj->tj", head_weights, torch.relu(torch.einsum("thc,jc->thj", q, self.keys)))
        publishes = layer == c["candidate_source_layer_id"]
        restricted = layer > c["candidate_source_layer_id"]
        selected, candidates, size = [], [], c["candidate_block_size"]
        for p in self.positions:
            visible = list(range((p + 1) // ratio))
            if publishes:
                blocks: dict[int, float] = {}
                for j in visible:
                    blocks[j // size] = max(blocks.get(j // size, -math.inf), float(scores[p, j]))
                if blocks:
                    blocks[max(blocks)] = math.inf
                best = sorted(blocks, key=lambda b: (-blocks[b], b))[: c["candidate_topk_blocks"]]
                candidates.append({b * size + k for b in best for k in range(size)})
            if restricted:
                visible = [j for j in visible if j in self.candidates[p]]
            best = sorted(visible, key=lambda j: (-float(scores[p, j]), j))[: c["index_topk"]]
            selected.append(sorted(best))
        self.selected = selected
        if publishes:
            self.candidates = candidates

    # Engram, section 2.8

    def engram(self, layer: int, streams: torch.Tensor) -> torch.Tensor:
        name, out = f"layers.{layer}.engram", streams.clone()
        q_weight, k_weight = self.w[f"{name}.q_weight"], self.w[f"{name}.k_weight"]
        rows = rows_of(self.tokens, self.is_image, self.c, self.classes, layer)
        for t, row in enumerate(rows):
            if not row:
                continue
            key_values = self.linear(f"{name}.wkv", self.w[f"{name}.embed.weight"][row].flatten()).unflatten(
                0, (self.m + 1, -1)
            )
            keys, value = key_values[:-1], key_values[-1]
            x = streams[t]
            delta = (norm(x, q_weight, 1e-20) * norm(keys, k_weight, 1e-20)).sum(1) * self.c["hidden_size"] ** -0.5
            gate = torch.sigmoid(torch.copysign(delta.abs().clamp(min=1e-6).sqrt(), delta))
            out[t] = x + gate.unsqueeze(1) * value
        return out

    # experts, section 2.9

    def experts(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        c, name = self.c, f"layers.{layer}.ffn"
        affinity = torch.nn.functional.softplus(self.linear(f"{name}.gate", h), threshold=1e9).sqrt()
        bias, image_bias = self.w[f"{name}.gate.bias"], self.w[f"{name}.gate.bias_vl"]
        ranked = affinity + torch.stack([image_bias if image else bias for image in self.is_image])
        chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, : c["num_experts_per_tok"]]
        h8 = self.round("activation", h)
        out = self.expert(f"{name}.shared_experts", h8, torch.ones(len(h), dtype=torch.float64))
        for e in range(c["n_routed_experts"]):
            tokens = (chosen == e).any(1).nonzero().flatten()
            if len(tokens):
                total = affinity.gather(1, chosen).sum(1)[tokens] + 1e-20
                weight = affinity[tokens, e] / total * c["routed_scaling_factor"]
                out[tokens] += self.expert(f"{name}.experts.{e}", h8[tokens], weight)
        return out

    def expert(self, name: str, h8: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        limit = self.c["swiglu_limit"]
        gate = self.linear(f"{name}.w1", h8).clamp(max=limit)
        up = self.linear(f"{name}.w3", h8).clamp(-limit, limit)
        activated = gate * torch.sigmoid(gate) * up * weight.unsqueeze(1)
        return self.linear(f"{name}.w2", self.round("activation", activated))
