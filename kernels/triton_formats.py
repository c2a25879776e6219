"""Number formats inside Triton kernels, by arithmetic and bits alone: SM80 has no FP8 types, and the CPU interpreter's
casts to them are wrong. `quant_formats.py` holds the definitions."""

import triton
import triton.language as tl


@triton.jit
def nearest_even(x):
    """The integer nearest to x, ties to even; |x| < 2**22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def with_sign(magnitude, x):
    """`magnitude`, which is not negative, with the sign of x, zeros included."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_value(byte):
    """2 ** (byte - 127) in fp32."""
    bits = byte.to(tl.int32) << 23
    return tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal_of_power(x):
    """1 / x of a power of two between 2**-126 and 2**126, exactly."""
    return (0x7F000000 - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two_byte(x):
    """The E8M0 byte of a power of two."""
    return (x.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def round_e4m3(x):
    """The nearest E4M3 number, ties to even; |x| at most 448."""
    exponent = (x.to(tl.int32, bitcast=True) & 0x7F800000) - (3 << 23)  # of a step of three mantissa bits
    step = tl.maximum(exponent, (127 - 9) << 23).to(tl.float32, bitcast=True)
    return with_sign(nearest_even(tl.abs(x) * reciprocal_of_power(step)) * step, x)


@triton.jit
def e4m3_byte(x):
    """The byte of an E4M3 number."""
    bits = x.to(tl.int32, bitcast=True)
    subnormal = (tl.abs(x) * 512.0).to(tl.int32)  # multiples of 2**-9
    magnitude = tl.where(tl.abs(x) < 0.015625, subnormal, ((bits & 0x7FFFFFFF) >> 20) - (120 << 3))
    return (magnitude | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_value(byte):
    """The fp32 value of an E4M3 byte."""
    code = byte.to(tl.int32)
    return (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def round_e2m1(x):
    """The nearest E2M1 number, ties to the even code, saturating at +-6."""
    magnitude = tl.minimum(tl.abs(x), 6.0)
    steps = tl.where(magnitude < 2.0, 2.0, tl.where(magnitude < 4.0, 1.0, 0.5))  # in a unit
    rounded = nearest_even(magnitude * steps) * tl.where(magnitude < 2.0, 0.5, tl.where(magnitude < 4.0, 1.0, 2.0))
    return with_sign(rounded, x)


@triton.jit
def e2m1_code(x):
    """The four-bit code of an E2M1 number, int32."""
    magnitude = tl.abs(x)
    large = tl.where(magnitude < 4.0, magnitude + 2.0, magnitude * 0.5 + 4.0)  # 2, 3 -> 4, 5; 4, 6 -> 6, 7
    code = tl.where(magnitude < 2.0, magnitude * 2.0, large).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_value(code):
    """The fp32 value of a four-bit E2M1 code."""
    bits = code.to(tl.int32)
    return (((bits & 7) << 22) | ((bits & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def fp8_group_sf(amax):
    """``2 ** ceil(log2(max(amax, 1e-4) / 448))``: the scale of a group of 32 for E4M3. 448 is 1.75 * 2**8."""
    bits = tl.maximum(amax, 1e-4).to(tl.int32, bitcast=True)
    return (((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def rounded_to_fp8(values, AXIS: tl.constexpr):
    """fp32 values to E4M3 times the power of two of their group, which lies along AXIS."""
    scale = tl.expand_dims(fp8_group_sf(tl.max(tl.abs(values), AXIS)), AXIS)
    return round_e4m3(values * reciprocal_of_power(scale)) * scale


@triton.jit
def row_rounded_to_fp8(values):
    """`rounded_to_fp8` of a row of fp32 channels [n], whose groups are 32 neighbours; n is a multiple of 32."""
    return tl.reshape(rounded_to_fp8(tl.reshape(values, [values.shape[0] // 32, 32]), 1), values.shape)


@triton.jit
def fp4_group_sf(amax):
    """``2 ** ceil(log2(max(amax, 6 * 2 ** -126) / 6))``: the scale of a group of 32 for E2M1. 6 is 1.5 * 2**2."""
    bits = tl.maximum(amax, 7.052966104933725e-38).to(tl.int32, bitcast=True)
    return (((bits + 0x3FFFFF) & 0x7F800000) - (2 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def fp4_kv_group_sf(amax):
    """``clamp(amax / 6, 2 ** -9, 448)`` rounded to E4M3: the scale of a group of 16 of a compressed entry."""
    return round_e4m3(tl.minimum(tl.maximum(tl.div_rn(amax, 6.0), 0.001953125), 448.0))


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter has no inline assembly


@triton.jit
def fp8_pair_tiles(pairs, sf):
    """(even, odd) channels, the lower and the higher bytes of uint16 pairs of E4M3 codes, times ``2 ** (sf - 127)``.

    In bf16, exactly; sf: bytes up to 134. A code's seven lower bits, shifted into place, are a bf16 number that is
    2**120 too small.
    """
    if INTERPRETED:
        factor = e8m0_value(sf)
        even, odd = e4m3_value(pairs & 255) * factor, e4m3_value(pairs >> 8) * factor
        return even.to(tl.bfloat16), odd.to(tl.bfloat16)
    factor = ((sf.to(tl.int16) + 120) << 7).to(tl.bfloat16, bitcast=True)
    pairs, factor = tl.broadcast(pairs, factor)
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 a, m, n, zero;
            mov.b32 zero, 0x80008000;
            shl.b32 a, $2, 8;
            shr.u32 m, a, 4;
            shr.u32 n, $2, 4;
            and.b32 m, m, 0x07f007f0;
            and.b32 n, n, 0x07f007f0;
            lop3.b32 m, a, 0x80008000, m, 0xea;
            lop3.b32 n, $2, 0x80008000, n, 0xea;
            fma.rn.bf16x2 $0, m, $3, zero;
            fma.rn.bf16x2 $1, n, $3, zero;
        }""",
        "=&r,=&r,r,r",
        [pairs, factor],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def fp4_tiles(codes, sf):
    """(even, odd) channels of packed E2M1 codes times ``2 ** (sf - 127)``, in bf16, exactly; sf: bytes up to 128.

    A code's three lower bits, shifted into place, are a bf16 number that is 2**126 too small.
    """
    if INTERPRETED:
        factor = e8m0_value(sf)
        even, odd = e2m1_value(codes & 15) * factor, e2m1_value(codes >> 4) * factor
        return even.to(tl.bfloat16), odd.to(tl.bfloat16)
    factor = ((sf.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)
    codes, factor = tl.broadcast(codes, factor)
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 a, b, m, n, p, q, zero;
            mov.b32 zero, 0x80008000;
            prmt.b32 a, $4, 0, 0x1404;
            prmt.b32 b, $4, 0, 0x3424;
            shr.u32 m, a, 2;
            shr.u32 n, b, 2;
            shl.b32 p, a, 4;
            shl.b32 q, b, 4;
            and.b32 m, m, 0x01c001c0;
            and.b32 n, n, 0x01c001c0;
            lop3.b32 m, p, 0x80008000, m, 0xea;
            lop3.b32 n, q, 0x80008000, n, 0xea;
            fma.rn.bf16x2 $0, m, $5, zero;
            fma.rn.bf16x2 $1, n, $6, zero;
            shr.u32 m, a, 6;
            shr.u32 n, b, 6;
            and.b32 m, m, 0x01c001c0;
            and.b32 n, n, 0x01c001c0;
            lop3.b32 m, a, 0x80008000, m, 0xea;
            lop3.b32 n, b, 0x80008000, n, 0xea;
            fma.rn.bf16x2 $2, m, $5, zero;
            fma.rn.bf16x2 $3, n, $6, zero;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [codes, factor],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
