"""DSpark's draft of one block in float64, after one whole sequence. Source: model specification, section 6."""

from copy import copy
from dataclasses import dataclass

import torch

from tests.oracle.model import Oracle, _Sequence, norm, rotate


@dataclass
class Draft:
    """tokens: the drafts, each the likeliest after those before it. logits: [k, vocab_size]. confidence: [k] logits."""

    tokens: list[int]
    logits: torch.Tensor
    confidence: torch.Tensor


def draft(oracle: Oracle, tokens: list[int], golden: int, length: int) -> Draft:
    """Draft `length` tokens after `tokens`, all of them processed by the target, and `golden` that follows."""
    with torch.no_grad():
        target = _Sequence(oracle, tokens)
        target.logits()
        return _Block(oracle, tokens, golden, length).draft(torch.cat(target.features, 1))


class _Block(_Sequence):
    """The k rows of one drafted block; its layers are the checkpoint's `mtp.*`, all of them window-only."""

    def __init__(self, oracle: Oracle, tokens: list[int], golden: int, k: int) -> None:
        c, drafter = oracle.config, copy(oracle)
        drafter.config = c | {
            "n_routed_experts": c["dspark_n_routed_experts"],
            "num_experts_per_tok": c["dspark_num_experts_per_tok"],
        }
        drafter.weights = oracle.weights | {
            name.replace("mtp", "layers"): weight for name, weight in oracle.weights.items() if name.startswith("mtp.")
        }
        self.anchor = len(tokens) - 1
        super().__init__(drafter, [golden] + [c["dspark_noise_token_id"]] * (k - 1))
        self.positions = [self.anchor + 1 + j for j in range(k)]

    def draft(self, features: torch.Tensor) -> Draft:
        c, last = self.c, f"layers.{self.c['num_nextn_predict_layers'] - 1}"
        projected = self.linear("mtp.0.main_proj", self.round("activation", features))
        x8 = self.round("activation", norm(projected, self.w["mtp.0.main_norm.weight"], self.eps))
        streams = self.w["embed.weight"][self.tokens].unsqueeze(1).repeat(1, self.m, 1)
        mix = torch.zeros(len(self.tokens), self.m, dtype=torch.float64)
        mix[:, 0] = 1
        pending = None
        for block in range(c["num_nextn_predict_layers"]):
            main = self.keys_of(block, x8, list(range(len(features))))
            for part in ("attn", "ffn"):
                streams = self.mixed(streams, pending)
                pre, post, comb = self.coefficients(f"layers.{block}.hc_{part}", streams)
                h = norm(
                    torch.einsum("ti,tic->tc", mix, streams), self.w[f"layers.{block}.{part}_norm.weight"], self.eps
                )
                y = self.block_attention(block, h, main) if part == "attn" else self.experts(block, h)
                mix, pending = pre, (post, comb, y)
        z = torch.einsum("ti,tic->tc", mix, self.mixed(streams, pending))
        base = self.linear("head", norm(z, self.w[f"{last}.norm.weight"], self.eps))

        drafted, logits, confidence, previous = [], [], [], self.tokens[0]
        for j in range(len(z)):
            m = self.w[f"{last}.markov_head.embed.weight"][previous]
            logits.append(base[j] + self.w[f"{last}.markov_head.head.weight"] @ m)
            confidence.append(self.w[f"{last}.confidence_head.proj.weight"][0] @ torch.cat([z[j], m]))
            previous = int(logits[-1].argmax())
            drafted.append(previous)
        return Draft(drafted, torch.stack(logits), torch.stack(confidence))

    def keys_of(self, block: int, x8: torch.Tensor, positions: list[int]) -> torch.Tensor:
        name = f"layers.{block}.attn"
        kv = norm(self.linear(f"{name}.wkv", x8), self.w[f"{name}.kv_norm.weight"], self.eps)
        return self.round("local_kv", rotate(kv, positions, self.frequencies[False]))

    def block_attention(self, block: int, h: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
        """Every row sees the window that ends at the anchor, and the whole block, later rows included."""
        c, name, frequencies = self.c, f"layers.{block}.attn", self.frequencies[False]
        heads, d = c["num_attention_heads"], c["head_dim"]
        h8 = self.round("activation", h)
        qr = norm(self.linear(f"{name}.wq_a", h8), self.w[f"{name}.q_norm.weight"], self.eps)
        q = self.linear(f"{name}.wq_b", self.round("activation", qr)).unflatten(1, (heads, d))
        q = rotate(q, self.positions, frequencies)
        window = main[max(0, self.anchor - c["sliding_window"] + 1) : self.anchor + 1]
        keys = torch.cat([window, self.keys_of(block, h8, self.positions)])
        sink = self.w[f"{name}.attn_sink"].expand(len(h), -1).unsqueeze(2)
        scores = torch.cat([torch.einsum("thc,sc->ths", q, keys) * d**-0.5, sink], 2)
        out = torch.einsum("ths,sc->thc", torch.softmax(scores, 2)[..., :-1], keys)
        out = self.round("activation", rotate(out, self.positions, frequencies, -1))
        groups, rank = c["o_groups"], c["o_lora_rank"]
        wo_a = self.w[f"{name}.wo_a.weight"].unflatten(0, (groups, rank))
        low = torch.einsum("tgk,grk->tgr", out.flatten(1).unflatten(1, (groups, -1)), wo_a)
        return self.linear(f"{name}.wo_b", self.round("activation", low.flatten(1)))
