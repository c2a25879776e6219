"""The definition of `rope`: what every other module of this folder must equal."""

import torch

from deepinfer_plugin.kernels.quant_formats import round_fp8


def rope(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool, round_to_fp8: bool) -> torch.Tensor:
    first = x.shape[2] - cos_sin.shape[1]
    even, odd = x[..., first::2].float(), x[..., first + 1 :: 2].float()  # [num_tokens, num_heads, R / 2]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    out = x.clone(memory_format=torch.contiguous_format)
    torch.sub(even * cos, odd * sin, out=out[..., first::2])
    torch.add(odd * cos, even * sin, out=out[..., first + 1 :: 2])
    return round_fp8(out) if round_to_fp8 else out
