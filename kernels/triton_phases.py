"""Channels in phases: how the operands of packed products lie, and how packed words become tensor-core operands.

A word of a packed weight holds WORD = 8 codes of neighbouring channels: 64 bits of FP8, 32 of FP4. Phase p of a block of
BLOCK = 128 channels is code p of its 16 words. A decoder gives the eight phases of a tile as eight operands of 16
channels each, without moving a code between threads; so the other operand's channels must lie in phases too:
channel 8 i + p of a block at place 16 p + i. The order of a sum is that of the phases, in every batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.quant_formats import BLOCK_SIZE
from deepinfer_plugin.kernels.triton_formats import (
    INTERPRETED,
    e2m1_value,
    e4m3_value,
    fp8_group_sf,
    reciprocal_of_power,
    round_e4m3,
)

WORD = 8
BLOCK = tl.constexpr(128)
FP8_BIAS, FP4_BIAS = tl.constexpr(120), tl.constexpr(126)  # log2 by which the shifted bits are too small


@dataclass(frozen=True)
class Phased:
    """Rows of bf16 values with their channels in phases, the last block padded with anything.

    values: [..., ceil(depth / 128) * 128], contiguous; depth: channels, a multiple of 8.
    """

    values: torch.Tensor
    depth: int

    @classmethod
    def empty(cls, *shape: int, depth: int, device: torch.device) -> "Phased":
        padded = num_blocks(depth) * BLOCK.value
        return cls(torch.empty(*shape, padded, dtype=torch.bfloat16, device=device), depth)


def num_blocks(depth: int) -> int:
    return -(-depth // BLOCK.value)


def in_phases(x: torch.Tensor, round_to_fp8: bool) -> Phased:
    """x: [n, depth], bf16 or fp32, unit stride along channels; rounded to FP8 first, or exact in bf16 as it is."""
    num_rows, depth = x.shape
    if depth % WORD or (round_to_fp8 and depth % BLOCK_SIZE):
        raise ValueError(f"packed products: channels must be multiples of {WORD}, of 32 where rounded, got {depth}")
    out = Phased.empty(num_rows, depth=depth, device=x.device)
    if out.values.numel():
        _in_phases[(num_rows, num_blocks(depth))](
            *(x, out.values, x.stride(0), out.values.stride(0), depth), ROUND=round_to_fp8, num_warps=1
        )
    return out


@triton.jit
def _in_phases(x, out, x_row, out_row, depth, ROUND: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_row + channel, channel < depth, 0.0).to(tl.float32)
    if ROUND:
        value = rounded_to_fp8(value)
    tl.store(out + row * out_row + place_of(channel), value.to(tl.bfloat16))


@triton.jit
def rounded_to_fp8(value):
    """[BLOCK] channels -> each group of 32 rounded to E4M3 times its power of two."""
    groups = tl.reshape(value, [BLOCK // 32, 32])
    scale = fp8_group_sf(tl.max(tl.abs(groups), 1))[:, None]
    return tl.reshape(round_e4m3(groups * reciprocal_of_power(scale)) * scale, [BLOCK])


@triton.jit
def place_of(channel):
    """Where a channel stands among those in phases."""
    return channel // BLOCK * BLOCK + channel % 8 * (BLOCK // 8) + channel % BLOCK // 8


@triton.jit
def factor_words(scales, BIAS: tl.constexpr):
    """The bf16 number ``2 ** (byte - 127 + BIAS)`` twice, for each of the 16 words of a block.

    scales: [rows], int32: the bytes of the block's four groups of 32 channels. Returns int32 [rows, 16].
    """
    shift = tl.arange(0, BLOCK // 8) // 4 * 8
    return (((scales[:, None] >> shift[None, :]) & 255) + BIAS) * 0x00800080


@triton.jit
def load_scales(sf, block, num_groups, present):
    """Four scale bytes of a block as an int32; sf: pointers to rows of bytes. Any rows, where the last is cut off."""
    word = tl.zeros(sf.shape, tl.int32)
    for group in tl.static_range(4):
        byte = tl.load(sf + block * 4 + group, present & (block * 4 + group < num_groups), 0).to(tl.int32)
        word = word | (byte << (8 * group))
    return word


def _decoder(bits: int) -> str:
    """Assembly: the phases of two words, as eight pairs of bf16; operands $8, $9: words, $10: their factor.

    A code's bits below the sign, shifted into place, are a bf16 number that is 2**120 (FP8) or 2**126 (FP4) too small.
    """
    lines = [".reg .b32 p, q, s, zero;", "mov.b32 zero, 0x80008000;"]
    if bits == 8:
        lines += [".reg .b32 a0, a1, b0, b1;", "mov.b64 {a0, a1}, $8;", "mov.b64 {b0, b1}, $9;"]
    for phase in range(WORD):
        byte = phase % 4 if bits == 8 else phase // 2
        selector = ((4 + byte) << 12) | (byte << 4)  # this byte of both words, each on top of 16 bits
        first, second = (f"a{phase // 4}", f"b{phase // 4}") if bits == 8 else ("$8", "$9")
        if bits == 8 or phase % 2 == 0:
            lines.append(f"prmt.b32 p, {first}, {second}, {selector:#x};")
        shift, mask, sign = (4, 0x07F007F0, "p") if bits == 8 else (2 + 4 * (phase % 2), 0x01C001C0, "p")
        if bits == 4 and phase % 2 == 0:
            lines.append("shl.b32 q, p, 4;")
            sign = "q"
        lines += [
            f"shr.u32 s, p, {shift};",
            f"and.b32 s, s, {mask:#010x};",
            f"lop3.b32 s, {sign}, 0x80008000, s, 0xea;",
            f"fma.rn.bf16x2 ${phase}, s, $10, zero;",
        ]
    return "{" + "\n".join(lines) + "}"


FP8_DECODER, FP4_DECODER = tl.constexpr(_decoder(8)), tl.constexpr(_decoder(4))
FP8_OPERANDS = tl.constexpr(",".join(["=&r"] * WORD) + ",l,l,r,r")
FP4_OPERANDS = tl.constexpr(",".join(["=&r"] * WORD) + ",r,r,r,r")


@triton.jit
def phases(words, factors, FP4: tl.constexpr):
    """The eight phases of a tile, bf16 [rows, 16] each, exactly.

    words: [rows, 16], int64 of FP8 codes or int32 of FP4 codes; factors: as `factor_words` gives them.
    """
    if INTERPRETED:
        return _interpreted_phases(words, factors, FP4)
    if FP4:
        return tl.inline_asm_elementwise(
            FP4_DECODER,
            FP4_OPERANDS,
            [words, factors],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    return tl.inline_asm_elementwise(
        FP8_DECODER,
        FP8_OPERANDS,
        [words, factors],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _interpreted_phases(words, factors, FP4: tl.constexpr):
    return (
        _interpreted_phase(words, factors, 0, FP4),
        _interpreted_phase(words, factors, 1, FP4),
        _interpreted_phase(words, factors, 2, FP4),
        _interpreted_phase(words, factors, 3, FP4),
        _interpreted_phase(words, factors, 4, FP4),
        _interpreted_phase(words, factors, 5, FP4),
        _interpreted_phase(words, factors, 6, FP4),
        _interpreted_phase(words, factors, 7, FP4),
    )


@triton.jit
def _interpreted_phase(words, factors, PHASE: tl.constexpr, FP4: tl.constexpr):
    factor = ((factors & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    if FP4:
        small = e2m1_value((words >> (4 * PHASE)) & 15) * 1.1754943508222875e-38  # 2**-126
    else:
        small = e4m3_value((words >> (8 * PHASE)) & 255) * 7.52316384526264e-37  # 2**-120
    return (small * factor).to(tl.bfloat16)
