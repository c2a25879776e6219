"""`engram_gate` in Triton: a program per token and stream."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_launch import chained, follow


def engram_gate(
    streams: torch.Tensor,
    key_values: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    skip: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, num_streams, hidden_size = streams.shape
    streams, key_values = streams.contiguous(), key_values.contiguous()
    out = torch.empty_like(streams)
    if num_tokens:
        block = triton.next_power_of_2(hidden_size)
        _engram_gate[(num_tokens, num_streams)](
            *(streams, key_values, q_weight.contiguous(), k_weight.contiguous(), skip, out, num_streams, hidden_size),
            *(hidden_size**-0.5, eps),
            HAS_SKIP=skip is not None,
            BLOCK=block,
            num_warps=min(8, max(1, block // 512)),
            **chained(),
        )
    return out


@triton.jit
def _engram_gate(
    streams,
    key_values,
    q_weight,
    k_weight,
    skip,
    out,
    num_streams,
    hidden_size,
    scale,
    eps,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    follow()
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    inside = channel < hidden_size
    row = (token * num_streams + stream) * hidden_size + channel
    entry = key_values + token * (num_streams + 1) * hidden_size + channel
    loaded = tl.load(streams + row, inside, 0.0)
    x = loaded.to(tl.float32)
    key = tl.load(entry + stream * hidden_size, inside, 0.0).to(tl.float32)
    value = tl.load(entry + num_streams * hidden_size, inside, 0.0).to(tl.float32)
    weight = tl.load(q_weight + stream * hidden_size + channel, inside, 0.0).to(tl.float32)
    weight *= tl.load(k_weight + stream * hidden_size + channel, inside, 0.0).to(tl.float32)
    dot = tl.sum(x * key * weight) * tl.rsqrt(tl.sum(x * x) / hidden_size + eps)
    dot *= tl.rsqrt(tl.sum(key * key) / hidden_size + eps) * scale
    root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    root = tl.where(dot < 0, -root, root)
    result = (x + value / (1 + tl.exp(-root))).to(loaded.dtype)
    if HAS_SKIP:
        result = tl.where(tl.load(skip + token) != 0, loaded, result)
    tl.store(out + row, result, inside)
