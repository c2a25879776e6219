"""Channels in phases: how the operands of packed products lie, and how packed words become tensor-core operands.

A word of a packed weight holds WORD = 8 codes of neighbouring channels: 64 bits of FP8, 32 of FP4. Phase p of a block
of BLOCK = 128 channels is code p of its 16 words. Decoders give the eight phases of a tile as eight operands of 16
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


def _decoders(fp4: bool) -> tuple[tl.constexpr, ...]:
    """Assembly for each phase: a pair of bf16 from two interleaved words ($1, $2) and their factor ($3).

    A code's bits, shifted into place, are a bf16 number that is 2**120 (FP8) or 2**126 (FP4) too small. Left shifts are
    products, which another unit of the machine computes.
    """
    if fp4:
        registers: tuple[str, ...] = ("$1", "$2")
        steps: tuple[tuple[str, ...], ...] = (
            ("and.b32 s, {r}, 0x81c081c0;",),
            ("mul.lo.u32 s, {r}, 8;", "and.b32 s, s, 0x81c081c0;"),
            ("mul.lo.u32 s, {r}, 64;", "and.b32 s, s, 0x81c081c0;"),
            (
                "mul.lo.u32 s, {r}, 2;",
                "and.b32 s, s, 0x80008000;",
                "shr.u32 t, {r}, 3;",
                "lop3.b32 s, t, 0x01800180, s, 0xea;",
                "shr.u32 t, {r}, 7;",
                "lop3.b32 s, t, 0x00400040, s, 0xea;",
            ),
        )
    else:
        registers = ("a", "b", "c", "d")
        steps = (
            ("and.b32 s, {r}, 0x87f087f0;",),
            (
                "shr.u32 t, {r}, 4;",
                "and.b32 t, t, 0x07000700;",
                "mul.lo.u32 s, {r}, 16;",
                "lop3.b32 s, s, 0x80f080f0, t, 0xea;",
            ),
        )
    split = () if fp4 else (".reg .b32 a, b, c, d;", "mov.b64 {a, b}, $1;", "mov.b64 {c, d}, $2;")
    frame = (".reg .b32 s, t, zero;", *split, "mov.b32 zero, 0x80008000;")  # -0 keeps the sign of a zero
    return tuple(
        tl.constexpr(
            "{"
            + "\n".join((*frame, *(line.replace("{r}", r) for line in step), "fma.rn.bf16x2 $0, s, $3, zero;"))
            + "}"
        )
        for r in registers
        for step in steps
    )


FP8_0, FP8_1, FP8_2, FP8_3, FP8_4, FP8_5, FP8_6, FP8_7 = _decoders(fp4=False)
FP4_0, FP4_1, FP4_2, FP4_3, FP4_4, FP4_5, FP4_6, FP4_7 = _decoders(fp4=True)


@triton.jit
def phases(words, factors, FP4: tl.constexpr):
    """The eight phases of a tile, bf16 [rows, 16] each, exactly.

    words: [rows, 16] interleaved, int64 of FP8 codes or int32 of FP4 codes; factors: as `factor_words` gives them.
    """
    if FP4:
        return (
            _phase(words, factors, 0, True, FP4_0),
            _phase(words, factors, 1, True, FP4_1),
            _phase(words, factors, 2, True, FP4_2),
            _phase(words, factors, 3, True, FP4_3),
            _phase(words, factors, 4, True, FP4_4),
            _phase(words, factors, 5, True, FP4_5),
            _phase(words, factors, 6, True, FP4_6),
            _phase(words, factors, 7, True, FP4_7),
        )
    else:
        return (
            _phase(words, factors, 0, False, FP8_0),
            _phase(words, factors, 1, False, FP8_1),
            _phase(words, factors, 2, False, FP8_2),
            _phase(words, factors, 3, False, FP8_3),
            _phase(words, factors, 4, False, FP8_4),
            _phase(words, factors, 5, False, FP8_5),
            _phase(words, factors, 6, False, FP8_6),
            _phase(words, factors, 7, False, FP8_7),
        )


@triton.jit
def _phase(words, factors, PHASE: tl.constexpr, FP4: tl.constexpr, DECODER: tl.constexpr):
    if INTERPRETED:
        phase = _interpreted_phase(words, factors, PHASE, FP4)
    else:
        operands: tl.constexpr = "=&r,r,r,r,r" if FP4 else "=&r,l,l,r,r"
        phase = tl.inline_asm_elementwise(DECODER, operands, [words, factors], dtype=tl.bfloat16, is_pure=True, pack=2)
    return phase


@triton.jit
def _interpreted_phase(words, factors, PHASE: tl.constexpr, FP4: tl.constexpr):
    WORDS: tl.constexpr = words.shape[1]
    pairs = tl.reshape(words, [words.shape[0], WORDS // 2, 2])
    first, second = tl.split(pairs)
    PART: tl.constexpr = PHASE // 4 if FP4 else PHASE // 2  # which 32 bits of the unit
    source = (first if PART == 0 else second) if FP4 else (first if PART < 2 else second) >> (32 * (PART % 2))
    half = tl.join(source & 0xFFFF, (source >> 16) & 0xFFFF).to(tl.int32)
    half = tl.reshape(half, [words.shape[0], WORDS])
    if FP4:
        if PHASE % 4 == 0:
            code = ((half >> 12) & 8) | ((half >> 6) & 7)
        elif PHASE % 4 == 1:
            code = ((half >> 9) & 8) | ((half >> 3) & 7)
        elif PHASE % 4 == 2:
            code = ((half >> 6) & 8) | (half & 7)
        else:
            code = ((half >> 11) & 8) | ((half >> 13) & 1) | ((half >> 9) & 6)
        small = e2m1_value(code) * 1.1754943508222875e-38  # 2**-126
    else:
        in_place = ((half >> 8) & 0x80) | ((half >> 4) & 0x7F)
        around_it = ((half >> 8) & 0x70) | ((half >> 4) & 0x80) | (half & 0x0F)
        code = around_it if PHASE % 2 else in_place
        small = e4m3_value(code) * 7.52316384526264e-37  # 2**-120
    factor = ((factors & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    return (small * factor).to(tl.bfloat16)
