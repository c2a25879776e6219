"""Products of packed weights: words of eight codes become tensor-core operands without leaving a thread.

`packed_weights.py` says how words lie. Phase p of a block, code p of its words, is one operand of 16 channels; eight of
them are a block. A decoder's steps all work on one element, so that the compiler reads words from shared memory as the
tensor core wants its operand, and decodes them where they are.
"""

import triton
import triton.language as tl

from deepinfer_plugin.kernels import packed_weights
from deepinfer_plugin.kernels.quant_formats import BLOCK_SIZE
from deepinfer_plugin.kernels.triton_formats import INTERPRETED, e2m1_value, e4m3_value

BLOCK = tl.constexpr(packed_weights.BLOCK)
WORDS = tl.constexpr(packed_weights.BLOCK // packed_weights.WORD)  # of a block
TAIL_WORDS = tl.constexpr(BLOCK_SIZE // packed_weights.WORD)  # of a group behind the last block
WORD = tl.constexpr(packed_weights.WORD)
FP8_BIAS, FP4_BIAS = tl.constexpr(120), tl.constexpr(126)  # log2 by which the shifted bits are too small


def _decoders(fp4: bool) -> tl.constexpr:
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
    return tl.constexpr(
        tuple(
            "{"
            + "\n".join((*frame, *(line.replace("{r}", r) for line in step), "fma.rn.bf16x2 $0, s, $3, zero;"))
            + "}"
            for r in registers
            for step in steps
        )
    )


FP8_DECODERS, FP4_DECODERS = _decoders(fp4=False), _decoders(fp4=True)


@triton.jit
def add_block(total, words, sf, sf_block, x, block, row_present, token_present, WHOLE: tl.constexpr, FP4: tl.constexpr):
    """``total + weight @ x.T`` of one block of channels.

    total: fp32 [rows, tokens]. words: pointers [rows, 16] to the first block, int64 of FP8 codes or int32 of FP4 codes;
    sf: [rows], to the rows' scales: where WHOLE (no row has a tail) four bytes in an int32, `sf_block` of them from one
    block to the next, else bytes.
    x: [tokens, 16], to the first block's first phase, bf16.
    """
    tile = tl.load(words + block * WORDS, row_present[:, None], 0)
    if WHOLE:
        scales = tl.load(sf + block * sf_block, row_present, 0)
    else:
        scales = tl.load(sf + block * 4, row_present, 0).to(tl.int32)
        for group in tl.static_range(1, 4):
            scales |= tl.load(sf + block * 4 + group, row_present, 0).to(tl.int32) << (8 * group)
    for phase in tl.static_range(8):
        inputs = tl.load(x + block * BLOCK + phase * WORDS, token_present[:, None], 0.0)
        total = tl.dot(decoded_phase(tile, scales, phase, phase // 2, FP4), tl.trans(inputs), total)
    return total


@triton.jit
def add_tail(total, words, sf, x, depth, row_present, token_present, FP4: tl.constexpr):
    """As `add_block`, of the groups behind the last block. sf: bytes."""
    word = tl.arange(0, WORDS)
    there = (word < TAIL_WORDS)[None, :]
    blocks = depth // BLOCK
    for group in range(blocks * 4, depth // 32):
        behind = group - blocks * 4
        tile = tl.load(words + blocks * WORDS + behind * TAIL_WORDS, row_present[:, None] & there, 0)
        scales = tl.load(sf + group, row_present, 0).to(tl.int32)
        for phase in tl.static_range(8):
            inputs = tl.load(x + group * 32 + phase * TAIL_WORDS, token_present[:, None] & there, 0.0)
            total = tl.dot(decoded_phase(tile, scales, phase, 0, FP4), tl.trans(inputs), total)
    return total


@triton.jit
def decoded_phase(words, scales, PHASE: tl.constexpr, GROUP: tl.constexpr, FP4: tl.constexpr):
    """Phase PHASE of the words, times the scales in byte GROUP, exactly: bf16 [rows, 16]."""
    BIAS: tl.constexpr = FP4_BIAS if FP4 else FP8_BIAS
    factors = ((scales >> (8 * GROUP)) & 255) * 0x00800080 + BIAS * 0x00800080  # 2 ** (byte - 127 + BIAS), twice
    words, factors = tl.broadcast(words, factors[:, None])
    if INTERPRETED:
        phase = _interpreted_phase(words, factors, PHASE, FP4)
    else:
        DECODERS: tl.constexpr = FP4_DECODERS if FP4 else FP8_DECODERS
        OPERANDS: tl.constexpr = "=&r,r,r,r,r" if FP4 else "=&r,l,l,r,r"
        phase = tl.inline_asm_elementwise(
            DECODERS[PHASE], OPERANDS, [words, factors], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return phase


@triton.jit
def _interpreted_phase(words, factors, PHASE: tl.constexpr, FP4: tl.constexpr):
    pairs = tl.reshape(words, [words.shape[0], WORDS // 2, 2])
    first, second = tl.split(pairs)
    PART: tl.constexpr = PHASE // 4 if FP4 else PHASE // 2  # which 32 bits of the pair
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
