"""V4.1's text network over whole sequences, differentiable: what the trainer and the evaluation run.

Weights are a dict of leaf tensors named as in the checkpoint, the experts of a layer stacked. The arithmetic follows
`dtype` and the weights' device; in float64 it is the test oracle's, to rounding.

Source: model specification, sections 2.1 to 2.10.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from rounding import ACTIVATION, WEIGHT, straight_through
from torch import Tensor

from deepinfer_plugin.kernels.engram_lookup.reference import engram_hash
from deepinfer_plugin.kernels.rope_table import rope_frequencies
from deepinfer_plugin.model_executor.models.checkpoint import Format, entries
from deepinfer_plugin.model_executor.models.engram_vocabulary import engram_multipliers, engram_offsets, engram_primes
from deepinfer_plugin.model_executor.models.shape import ModelShape

Weights = dict[str, Tensor]


def stacked_name(name: str) -> str:
    """`layers.3.ffn.experts.7.w1` -> `layers.3.ffn.experts.w1`; other names stay."""
    head, found, tail = name.partition(".experts.")
    return f"{head}.experts.{tail.partition('.')[2]}" if found else name


@dataclass
class Output:
    """logits: [B, T, vocab_size] fp32 or more. features: [B, T, targets * hidden_size], for the draft blocks.
    index_loss: how far the indexers are from the attention. loads: [layers, experts], tokens that chose each expert.
    balance_loss: 1 when the loads are even."""

    logits: Tensor
    features: Tensor
    index_loss: Tensor
    loads: Tensor
    balance_loss: Tensor


@dataclass
class Memory:
    """What a layer leaves for the next ones: compressed entries, index keys, and which entries each token reads."""

    entries: Tensor | None = None  # [B, n, head_dim]
    keys: Tensor | None = None  # [B, n, index_head_dim]
    selected: Tensor | None = None  # [B, T, n] bool
    candidates: Tensor | None = None  # [B, T, n] bool


class Network:
    """One set of weights in one precision.

    Args:
        shape: sizes; classes: int64 [vocab_size], Engram's class of each token.
        weights: leaf tensors by stacked name.
        dtype: of streams and products; norms, softmax and mixes are fp32, or float64 if `dtype` is.
        rounded: False leaves out every FP8, FP4 and BF16 step, of weights too.
        index_rows: queries a sequence on which the indexers learn; 0: not at all.
    """

    def __init__(
        self,
        shape: ModelShape,
        classes: Tensor,
        weights: Weights,
        dtype: torch.dtype,
        rounded: bool = True,
        index_rows: int = 0,
    ) -> None:
        self.shape, self.classes, self.weights = shape, classes, weights
        self.dtype, self.rounded, self.index_rows = dtype, rounded, index_rows
        self.wide = torch.promote_types(dtype, torch.float32)
        self.formats: dict[str, Format] = {stacked_name(entry.name): entry.format for entry in entries(shape)}
        self.stored: Weights = {}
        self.device = classes.device

    def forward(self, tokens: Tensor) -> Output:
        """tokens: int64 [B, T], every row a sequence from position 0 on; T even."""
        s = self.shape
        self.stored = {}  # weights as the checkpoint will hold them, made once a forward
        hidden = F.embedding(tokens, self.w("embed.weight")).to(self.dtype)
        streams = hidden.unsqueeze(2).repeat(1, 1, s.hc_mult, 1)  # [B, T, m, D]
        mix = self.first_mix(tokens)
        pending, memory, features, index_loss = None, Memory(), [], []
        loads, balance = [], []
        for layer in range(s.num_hidden_layers):
            if pending is not None:
                streams = spread(streams, *pending)
            if layer in s.engram_layer_ids:
                streams = self.engram(layer, tokens, streams)
            if layer in s.dspark_target_layer_ids:
                features.append(streams.to(self.wide).mean(2).to(self.dtype))
            h, mix, post, comb = self.gathered(f"layers.{layer}", "attn", streams, mix)
            y, loss = self.attention(layer, h, memory)
            index_loss += [loss] if loss is not None else []
            streams = spread(streams, post, comb, y)
            h, mix, post, comb = self.gathered(f"layers.{layer}", "ffn", streams, mix)
            y, load, loss = self.experts(f"layers.{layer}.ffn", h, s.num_experts_per_tok)
            loads, balance = [*loads, load], [*balance, loss]
            pending = post, comb, y
        u = collapsed(spread(streams, *pending), mix)
        return Output(
            self.head(norm(u, self.w("norm.weight"), s.rms_norm_eps)),
            torch.cat(features, -1),
            torch.stack(index_loss).mean() if index_loss else torch.zeros((), device=self.device),
            torch.stack(loads),
            torch.stack(balance).mean(),
        )

    def w(self, name: str) -> Tensor:
        """A weight as it is stored, with the gradient of the one that is trained."""
        if name not in self.stored:
            weight = self.weights[name]
            self.stored[name] = straight_through(WEIGHT[self.formats[name]])(weight) if self.rounded else weight
        return self.stored[name]

    def round(self, kind: str, x: Tensor) -> Tensor:
        return straight_through(ACTIVATION[kind])(x) if self.rounded else x

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), self.w(name).to(self.dtype))

    def head(self, x: Tensor) -> Tensor:
        return self.linear("head.weight", x).to(self.wide)

    # hyper-connections, section 2.2

    def first_mix(self, tokens: Tensor) -> Tensor:
        mix = torch.zeros(*tokens.shape, self.shape.hc_mult, dtype=self.wide, device=self.device)
        mix[..., 0] = 1
        return mix

    def gathered(self, block: str, part: str, streams: Tensor, mix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The sublayer's input, the mix of the next sublayer, and where this one's output goes."""
        s, name = self.shape, f"{block}.hc_{part}"
        return gather(
            streams,
            mix,
            self.w(f"{name}_fn"),
            self.w(f"{name}_base"),
            self.w(f"{name}_scale"),
            self.w(f"{block}.{part}_norm.weight"),
            s.rms_norm_eps,
            s.hc_eps,
            s.hc_sinkhorn_iters,
        )

    # attention, sections 2.3 to 2.7

    @cached_property
    def tables(self) -> dict[bool, Tensor]:
        """cos and sin, [positions, 2, pairs]; key: whether the layer has global memory."""
        s, tables = self.shape, {}
        positions = torch.arange(s.max_position_embeddings, dtype=torch.float32)
        for scaled in (False, True):
            theta = s.compress_rope_theta if scaled else s.rope_theta
            frequencies = rope_frequencies(s.qk_rope_head_dim, theta, s.yarn if scaled else None)
            angle = torch.outer(positions, frequencies).double()
            tables[scaled] = torch.stack([angle.cos(), angle.sin()], 1).to(self.wide).to(self.device)
        return tables

    def queries(self, name: str, h8: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries [..., heads, head_dim], and the latent that an indexer shares."""
        s = self.shape
        qr = norm(self.linear(f"{name}.wq_a", h8), self.w(f"{name}.q_norm.weight"), s.rms_norm_eps)
        qr8 = self.round("activation", qr)
        q = self.linear(f"{name}.wq_b", qr8).unflatten(-1, (s.num_attention_heads, s.head_dim))
        return rotate(q, table.unsqueeze(-3)), qr8

    def local_keys(self, name: str, h8: Tensor, table: Tensor) -> Tensor:
        kv = norm(self.linear(f"{name}.wkv", h8), self.w(f"{name}.kv_norm.weight"), self.shape.rms_norm_eps)
        return self.round("local_kv", rotate(kv, table))

    def attention(self, layer: int, h: Tensor, memory: Memory) -> tuple[Tensor, Tensor | None]:
        s, name, ratio = self.shape, f"layers.{layer}.attn", self.shape.ratio(layer)
        num_tokens = h.shape[1]
        table = self.tables[ratio > 0][:num_tokens]
        h8 = self.round("activation", h)
        q, qr8 = self.queries(name, h8, table)
        keys = self.local_keys(name, h8, table)
        place = torch.arange(num_tokens, device=self.device)
        age = place[:, None] - place[None]
        visible = ((age >= 0) & (age < s.sliding_window)).expand(len(h), -1, -1)
        loss = None
        if layer in s.kv_source_layer_ids:
            self.compress(name, ratio, h, memory)
        if layer in s.index_source_layer_ids:
            loss = self.select(layer, ratio, qr8, h, q, keys, visible, memory)
        if ratio:
            assert memory.entries is not None and memory.selected is not None
            keys = torch.cat([keys, memory.entries], 1)
            visible = torch.cat([visible, memory.selected], 2)
        out = attend(q, keys, visible, self.w(f"{name}.attn_sink"))
        return self.output_projection(name, out, table), loss

    def output_projection(self, name: str, out: Tensor, table: Tensor) -> Tensor:
        """out: [..., heads, head_dim], still rotated like the keys."""
        s = self.shape
        out = self.round("activation", rotate(out, table.unsqueeze(-3), inverse=True))
        wo_a = self.w(f"{name}.wo_a").to(self.dtype).unflatten(0, (s.o_groups, s.o_lora_rank))
        grouped = out.flatten(-2).unflatten(-1, (s.o_groups, -1))
        low = torch.einsum("...gk,grk->...gr", grouped, wo_a).flatten(-2)
        return self.linear(f"{name}.wo_b", self.round("activation", low))

    def compress(self, name: str, ratio: int, h: Tensor, memory: Memory) -> None:
        eps = self.shape.rms_norm_eps
        v = self.linear(f"{name}.compressor.wkv.weight", h)
        if ratio == 2:
            v = v.to(self.wide).unflatten(1, (-1, 2))
            g = self.linear(f"{name}.compressor.wgate.weight", h).to(self.wide).unflatten(1, (-1, 2))
            v = (torch.softmax(g, 2) * v).sum(2).to(self.dtype)
        latent = norm(v, self.w(f"{name}.compressor.norm.weight"), eps)
        table = self.tables[True][: h.shape[1] : ratio]
        memory.entries = self.round("entry", rotate(latent, table))
        latent = latent.detach()  # the indexer learns from the attention, not the other way round
        key = norm(self.linear(f"{name}.indexer.wk.weight", latent), self.w(f"{name}.indexer.k_norm.weight"), eps)
        memory.keys = self.round("index", rotate(key, table))

    def select(
        self, layer: int, ratio: int, qr8: Tensor, h: Tensor, q: Tensor, keys: Tensor, local: Tensor, memory: Memory
    ) -> Tensor | None:
        """Choose the entries that each token reads; return how far the indexer is from the attention, if it learns."""
        s, name = self.shape, f"layers.{layer}.attn.indexer"
        num_tokens, num_entries = h.shape[1], memory.entries.shape[1]
        place = torch.arange(num_tokens, device=self.device)
        complete = torch.arange(num_entries, device=self.device)[None] < ((place[:, None] + 1) // ratio)  # [T, n]
        qi = self.linear(f"{name}.wq_b", qr8.detach()).unflatten(-1, (s.index_n_heads, s.index_head_dim))
        qi = self.round("index", rotate(qi, self.tables[True][:num_tokens].unsqueeze(-3)))
        wi = self.linear(f"{name}.weights_proj.weight", h.detach())
        with torch.no_grad():
            scores = index_scores(qi, wi, memory.keys, self.wide).masked_fill(~complete, -torch.inf)
            pool = complete
            if s.searches_candidates(layer):
                pool = memory.candidates
            memory.selected = largest(scores.masked_fill(~pool, -torch.inf), s.index_topk)
            if layer == s.candidate_source_layer_id:
                memory.candidates = candidate_entries(scores, s.candidate_block_size, s.candidate_topk_blocks)
        if not self.index_rows:
            return None
        rows = torch.rand(num_tokens - ratio, device=self.device).topk(self.index_rows).indices + ratio - 1
        with torch.no_grad():
            teacher = attention_on_entries(q[:, rows], keys, memory.entries, local[:, rows], complete[rows],
                                           self.w(f"layers.{layer}.attn.attn_sink"))  # fmt: skip
        learnt = index_scores(qi[:, rows], wi[:, rows], memory.keys, self.wide)
        learnt = learnt * (s.index_n_heads * s.index_head_dim) ** -0.5  # keeps the softmax from starting saturated
        logs = torch.log_softmax(learnt.masked_fill(~complete[rows], -torch.inf), -1).masked_fill(~complete[rows], 0)
        return (torch.special.xlogy(teacher, teacher) - teacher * logs).sum(-1).mean()

    # Engram, section 2.8

    @cached_property
    def hashes(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Multipliers, primes and offsets of every Engram layer."""
        s = self.shape
        return [
            tuple(
                x.to(self.device)
                for x in (
                    engram_multipliers(layer, s.engram_compressed_vocab_size, s.engram_max_ngram_size),
                    primes,
                    engram_offsets(primes),
                )
            )
            for layer, primes in zip(s.engram_layer_ids, engram_primes(s), strict=True)
        ]

    def engram(self, layer: int, tokens: Tensor, streams: Tensor) -> Tensor:
        s, name = self.shape, f"layers.{layer}.engram"
        classes = self.classes[tokens]
        pad = self.classes[s.engram_pad_token_id]
        grams = [classes]
        for k in range(1, s.engram_max_ngram_size):
            grams.append(torch.cat([pad.expand(len(tokens), k), classes[:, :-k]], 1))
        grams = torch.stack(grams, -1).flatten(0, 1)
        rows = engram_hash(grams, *self.hashes[s.engram_layer_ids.index(layer)])
        found = F.embedding(rows, self.w(f"{name}.embed")).flatten(1).view(*tokens.shape, -1)
        key_values = self.linear(f"{name}.wkv", found).unflatten(-1, (s.hc_mult + 1, s.hidden_size))
        return remember(streams, key_values, self.w(f"{name}.q_weight"), self.w(f"{name}.k_weight"))

    # experts, section 2.9

    def experts(self, name: str, h: Tensor, num_chosen: int) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output; how many tokens chose each expert; a loss that is 1 when the load is even."""
        flat = h.flatten(0, 1)
        affinity = F.softplus(self.linear(f"{name}.gate.weight", flat).to(self.wide)).sqrt()
        chosen = (affinity.detach() + self.w(f"{name}.gate.bias")).topk(num_chosen, -1).indices
        weight = affinity.gather(1, chosen)
        weight = weight / (weight.sum(1, keepdim=True) + 1e-20) * self.shape.routed_scaling_factor
        num_experts = affinity.shape[1]
        load = torch.zeros(num_experts, device=self.device, dtype=self.wide)
        load = load.index_add(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=self.wide))
        share = affinity / affinity.sum(1, keepdim=True)
        balance = (share.mean(0) * load).sum() * num_experts / load.sum()

        h8 = self.round("activation", flat)
        order = chosen.flatten().sort(stable=True).indices
        ends = load.cumsum(0).int()
        rows = h8[order // num_chosen]
        gate = grouped_linear(rows, self.w(f"{name}.experts.w1").to(self.dtype), ends)
        up = grouped_linear(rows, self.w(f"{name}.experts.w3").to(self.dtype), ends)
        activated = self.round("activation", swiglu(gate, up, weight.flatten()[order, None], self.shape.swiglu_limit))
        routed = grouped_linear(activated.to(self.dtype), self.w(f"{name}.experts.w2").to(self.dtype), ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=self.device))
        out = routed[back].view(len(flat), num_chosen, -1).to(self.wide).sum(1)
        shared = f"{name}.shared_experts"
        one = torch.ones((), dtype=self.wide, device=self.device)
        activated = swiglu(
            self.linear(f"{shared}.w1", h8), self.linear(f"{shared}.w3", h8), one, self.shape.swiglu_limit
        )
        out = out + self.linear(f"{shared}.w2", self.round("activation", activated)).to(self.wide)
        return out.to(self.dtype).view(h.shape), load, balance


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """Turn adjacent pairs of the last channels. table: [..., 2, pairs], broadcast against x without its last axis."""
    width = 2 * table.shape[-1]
    cos, sin = table.unbind(-2)
    if inverse:
        sin = -sin
    a, b = x[..., -width:].to(table.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-width], turned.to(x.dtype)], -1)


def sinkhorn(c: Tensor, iterations: int, eps: float) -> Tensor:
    a = torch.softmax(c, -1) + eps
    a = a / (a.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        a = a / (a.sum(-1, keepdim=True) + eps)
        a = a / (a.sum(-2, keepdim=True) + eps)
    return a


def gather(
    streams: Tensor, mix: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight: Tensor,
    eps: float, hc_eps: float, iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Steps 3 to 5 of section 2.2: the sublayer's input, and `pre`, `post`, `comb`."""
    m = streams.shape[-2]
    v = streams.flatten(-2).to(mix.dtype)
    z = F.linear(v, fn.to(mix.dtype)) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    a, b, c = z.split([m, m, m * m], -1)
    pre = torch.sigmoid(a * scale[0] + base[:m]) + hc_eps
    post = 2 * torch.sigmoid(b * scale[1] + base[m : 2 * m])
    comb = sinkhorn((c * scale[2] + base[2 * m :]).unflatten(-1, (m, m)), iterations, hc_eps)
    return norm(collapsed(streams, mix), weight, eps), pre, post, comb


def collapsed(streams: Tensor, mix: Tensor) -> Tensor:
    return (mix.unsqueeze(-1) * streams.to(mix.dtype)).sum(-2).to(streams.dtype)


def spread(streams: Tensor, post: Tensor, comb: Tensor, y: Tensor) -> Tensor:
    """Step 1 of section 2.2: the sublayer's output joins every stream, and the streams mix."""
    mixed = (comb.unsqueeze(-1) * streams.to(comb.dtype).unsqueeze(-2)).sum(-3)
    return (post.unsqueeze(-1) * y.to(post.dtype).unsqueeze(-2) + mixed).to(streams.dtype)


def remember(streams: Tensor, key_values: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
    """Add Engram's value to every stream, as far as the stream's gate lets it."""
    wide = torch.promote_types(streams.dtype, torch.float32)
    x, keys, value = streams.to(wide), key_values[..., :-1, :].to(wide), key_values[..., -1:, :].to(wide)
    r = torch.rsqrt(x.square().mean(-1) + 1e-20) * torch.rsqrt(keys.square().mean(-1) + 1e-20)
    delta = (x * q_weight * keys * k_weight).sum(-1) * r * x.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(delta.abs().clamp(min=1e-6).sqrt(), delta))
    return (x + gate.unsqueeze(-1) * value).to(streams.dtype)


def swiglu(gate: Tensor, up: Tensor, weight: Tensor, limit: float) -> Tensor:
    wide = weight.dtype
    return F.silu(gate.to(wide).clamp(max=limit)) * up.to(wide).clamp(-limit, limit) * weight


def attend(q: Tensor, keys: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
    """One softmax over the visible keys and the head's sink. Keys are values too.

    Args:
        q: [B, T, heads, d]; keys: [B, S, d]; visible: bool [B, T, S]; sink: [heads].

    The sink is one more key: a channel beside the d holds the sink in the queries and sqrt(d) in that key alone, so
    that one call of torch's attention computes it all.
    """
    d, channels = q.shape[-1], 8  # more channels than the one: attention kernels want a multiple of 8
    q = torch.cat([q, F.pad(sink.to(q.dtype)[:, None], (0, channels - 1)).expand(*q.shape[:-1], channels)], -1)
    num_keys = keys.shape[1] + 1
    keys = F.pad(keys, (0, channels, 0, 1 + -num_keys % 8))
    keys = keys + _sink_key(keys.shape[1:], num_keys - 1, d, keys)
    visible = F.pad(F.pad(visible, (0, 1), value=True), (0, -num_keys % 8))
    keys = keys.unsqueeze(1).expand(-1, q.shape[2], -1, -1)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, keys, visible.unsqueeze(1), scale=d**-0.5)
    return out.transpose(1, 2)[..., :d]


def _sink_key(size: torch.Size, row: int, d: int, like: Tensor) -> Tensor:
    key = torch.zeros(size, dtype=like.dtype, device=like.device)
    key[row, d].fill_(d**0.5)
    return key


def attention_on_entries(
    q: Tensor, local_keys: Tensor, entries: Tensor, local: Tensor, complete: Tensor, sink: Tensor
) -> Tensor:
    """What a dense attention would give each entry, heads summed, sum 1: [B, R, n]."""
    keys = torch.cat([local_keys, entries], 1)
    logits = torch.einsum("brhd,bsd->bhrs", q, keys).to(sink.dtype) * q.shape[-1] ** -0.5
    visible = torch.cat([local, complete.expand(len(q), -1, -1)], 2)
    logits = logits.masked_fill(~visible.unsqueeze(1), -torch.inf)
    logits = torch.cat([logits, sink[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    share = torch.softmax(logits, -1)[..., local_keys.shape[1] : -1].sum(1)
    return share / share.sum(-1, keepdim=True)


def index_scores(q: Tensor, weight: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """sum over heads of weight * relu(q . key): [B, T, n]."""
    per_head = torch.einsum("bthc,bnc->bthn", q, keys).relu()
    return torch.einsum("bth,bthn->btn", weight.to(dtype), per_head.to(dtype))


def largest(scores: Tensor, count: int) -> Tensor:
    """bool, True at the `count` largest of the last axis that are above -inf; among equals, the first ones."""
    if scores.shape[-1] <= count:
        return scores > -torch.inf
    border = scores.topk(count, -1).values[..., -1:]
    above, equal = scores > border, scores == border
    room = count - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= room))) & (scores > -torch.inf)


def candidate_entries(scores: Tensor, block_size: int, num_blocks: int) -> Tensor:
    """The entries in the best blocks, the newest block always among them. scores: -inf where not visible."""
    num_entries = scores.shape[-1]
    blocks = F.pad(scores, (0, -num_entries % block_size), value=-torch.inf).unflatten(-1, (-1, block_size))
    best = blocks.amax(-1)
    seen = best > -torch.inf
    newest = seen & ~F.pad(seen[..., 1:], (0, 1))
    kept = largest(best.masked_fill(newest, torch.inf), num_blocks)
    return kept.repeat_interleave(block_size, -1)[..., :num_entries] & (scores > -torch.inf)


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows sorted by expert, each times its expert's weight [E, N, K]. ends: int32 [E], where an expert's rows end."""
    if rows.device.type == "cuda":
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    parts = torch.tensor_split(rows, ends[:-1].tolist())
    return torch.cat([F.linear(part, expert) for part, expert in zip(parts, weight, strict=True)])
