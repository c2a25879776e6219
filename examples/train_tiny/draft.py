"""DSpark's three draft blocks over many anchors of whole sequences at once, differentiable.

An anchor is the position of the last token whose target forward is done. From the token after it, a block drafts the
next `block size` tokens.

Source: model specification, section 6.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from network import Network, Weights, attend, collapsed, norm, spread
from torch import Tensor


@dataclass
class Drafts:
    """base: [B, A, k, vocab_size], logits without the Markov head. hidden: [B, A, k, hidden_size], before the norm.
    loads: [blocks, experts] and balance_loss: as in `network.Output`."""

    base: Tensor
    hidden: Tensor
    loads: Tensor
    balance_loss: Tensor


def main_keys(network: Network, features: Tensor) -> list[Tensor]:
    """Keys of tokens that the target has processed, for each block: [B, T, head_dim]."""
    s = network.shape
    projected = network.linear("mtp.0.main_proj", network.round("activation", features))
    x8 = network.round("activation", norm(projected, network.w("mtp.0.main_norm.weight"), s.rms_norm_eps))
    table = network.tables[False][: features.shape[1]]
    return [network.local_keys(f"mtp.{block}.attn", x8, table) for block in range(s.num_nextn_predict_layers)]


def draft(network: Network, features: Tensor, anchors: Tensor, golden: Tensor) -> Drafts:
    """Run the draft blocks.

    Args:
        features: [B, T, targets * hidden_size], of the target's forward; rows after an anchor are not read for it.
        anchors: int64 [B, A]; golden: int64 [B, A], the token at anchor + 1.
    """
    s, k = network.shape, network.shape.dspark_block_size
    rows, window = anchors.shape[0] * anchors.shape[1], s.sliding_window
    ids = torch.full((rows, k), s.dspark_noise_token_id, device=network.device)
    ids[:, 0] = golden.flatten()
    past = anchors.flatten()[:, None] - window + 1 + torch.arange(window, device=network.device)  # [rows, W]
    sequence = torch.arange(len(anchors), device=network.device).repeat_interleave(anchors.shape[1])[:, None]
    visible = torch.cat([past >= 0, past.new_ones(rows, k, dtype=torch.bool)], 1)
    visible = visible[:, None].expand(-1, k, -1)
    positions = anchors.flatten()[:, None] + 1 + torch.arange(k, device=network.device)
    table = network.tables[False][positions]  # [rows, k, 2, pairs]

    hidden = F.embedding(ids, network.w("embed.weight")).to(network.dtype)
    streams = hidden.unsqueeze(2).repeat(1, 1, s.hc_mult, 1)
    mix, pending, loads, balance = network.first_mix(ids), None, [], []
    for block, keys in enumerate(main_keys(network, features)):
        name = f"mtp.{block}"
        if pending is not None:
            streams = spread(streams, *pending)
        h, mix, post, comb = network.gathered(name, "attn", streams, mix)
        h8 = network.round("activation", h)
        q, _ = network.queries(f"{name}.attn", h8, table)
        own = network.local_keys(f"{name}.attn", h8, table)
        all_keys = torch.cat([keys[sequence, past.clamp(min=0)], own], 1)
        out = attend(q, all_keys, visible, network.w(f"{name}.attn.attn_sink"))
        streams = spread(streams, post, comb, network.output_projection(f"{name}.attn", out, table))
        h, mix, post, comb = network.gathered(name, "ffn", streams, mix)
        y, load, loss = network.experts(f"{name}.ffn", h, s.dspark_num_experts_per_tok)
        loads, balance = [*loads, load], [*balance, loss]
        pending = post, comb, y
    z = collapsed(spread(streams, *pending), mix).unflatten(0, anchors.shape)
    last = f"mtp.{s.num_nextn_predict_layers - 1}"
    base = network.head(norm(z, network.w(f"{last}.norm.weight"), s.rms_norm_eps))
    return Drafts(base, z, torch.stack(loads), torch.stack(balance).mean())


def markov(network: Network, drafts: Drafts, previous: Tensor, place: int | slice) -> tuple[Tensor, Tensor]:
    """Logits of the draft at `place`, and the logit of its confidence, given the token before it.

    Args:
        previous: int64 [B, A] for one place, [B, A, k] for all of them (`slice(None)`).
    """
    last = f"mtp.{network.shape.num_nextn_predict_layers - 1}"
    m = F.embedding(previous, network.w(f"{last}.markov_head.embed.weight")).to(network.dtype)
    logits = drafts.base[:, :, place] + network.linear(f"{last}.markov_head.head.weight", m).to(network.wide)
    both = torch.cat([drafts.hidden[:, :, place], m], -1).to(network.wide)
    return logits, (both @ network.w(f"{last}.confidence_head.proj.weight").to(network.wide).T).squeeze(-1)


def draft_weights(weights: Weights) -> Weights:
    """The part of the weights that belongs to the draft blocks alone."""
    return {name: weight for name, weight in weights.items() if name.startswith("mtp.")}
