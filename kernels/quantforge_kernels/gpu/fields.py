"""Fields of packed words as numbers, and the parameters of groups: what the kernels over planes share.

``MODE``: 0 converts integers, 1 puts an exponent above them in plain Triton, 2 does so with ``lop3``
written out as inline assembly. The interpreter runs 0 and 1; 1 and 2 give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mask_or(word, MASK: tl.constexpr, BASE: tl.constexpr, MODE: tl.constexpr):
    """Compute ``(word & MASK) | BASE`` in one instruction."""
    if MODE == 2:
        mask = tl.full(word.shape, MASK, tl.int32)
        base = tl.full(word.shape, BASE, tl.int32)
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;",
            "=r,r,r,r",
            [word, mask, base],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return (word & MASK) | BASE


@triton.jit
def bias_of(FIELD: tl.constexpr, WIDTH: tl.constexpr, MODE: tl.constexpr):
    """Return the bias that `biased_field` adds to the code."""
    if MODE == 0:
        return 0.0
    if WIDTH == 8:
        return 256.0
    return (2048 >> (WIDTH * (FIELD % (8 // WIDTH)))) * 1.0


@triton.jit
def biased_field(word, FIELD: tl.constexpr, WIDTH: tl.constexpr, MODE: tl.constexpr):
    """Return the code in a field, plus `bias_of`, as float32."""
    MASK: tl.constexpr = (1 << WIDTH) - 1
    if MODE == 0:
        return ((word >> (WIDTH * FIELD)) & MASK).to(tl.float32)
    PLACE: tl.constexpr = 15 if WIDTH == 8 else 12 + (WIDTH * FIELD) % 8
    BYTE: tl.constexpr = (WIDTH * FIELD) // 8
    LEFT: tl.constexpr = (15 if WIDTH == 8 else 12) - 8 * BYTE
    moved = word << LEFT if LEFT > 0 else word >> (-LEFT)
    raw = mask_or(moved, MASK << PLACE, (150 - PLACE) << 23, MODE)
    return raw.to(tl.float32, bitcast=True)


@triton.jit
def float8_value(word, i: tl.constexpr):
    """Return the float8_e4m3fn in byte ``i`` as float32.

    Its sign and its seven other bits, moved to where float32 has them, are the number times 2^-120,
    subnormal ones included. (NaN is refused when weights are prepared.)
    """
    raw = ((word << (24 - 8 * i)) >> 4) & -0x78100000  # 0x87F00000
    return raw.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def wide_float8_value(word, i: tl.constexpr):
    """Return the float8_e5m2 in byte ``i`` as float32; infinities are refused as well."""
    raw = ((word << (24 - 8 * i)) >> 3) & -0x70200000  # 0x8FE00000
    return raw.to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2^112


@triton.jit
def parameter(base, second, row, group, mask, stride, LEVELS: tl.constexpr, SUPER: tl.constexpr):
    """Load a scale, zero point or minimum in float32; of two levels, their product.

    ``LEVELS``: 1; 2; 3, the lower one in pairs of 4 bits; 4, the lower one in bytes of float8_e4m3fn.
    """
    if LEVELS == 3:
        pair = tl.load(base + row * (stride // 2) + group // 2, mask=mask, other=0).to(tl.int32)
        value = ((pair >> (4 * (group % 2))) & 15).to(tl.float32)
    elif LEVELS == 4:
        byte = tl.load(base + row * stride + group, mask=mask, other=0).to(tl.int32)
        value = float8_value(byte, 0)
    else:
        value = tl.load(base + row * stride + group, mask=mask, other=0).to(tl.float32)
    if LEVELS >= 2:
        place = row * (stride // SUPER) + group // SUPER
        value *= tl.load(second + place, mask=mask, other=0).to(tl.float32)
    return value


@triton.jit
def table_value(word, i: tl.constexpr, table, WIDTH: tl.constexpr, MODE: tl.constexpr):
    """Load the entry of a codebook of 16, at a multiple of 64 bytes, that a field names.

    Triton would give a load of its own a layout of its own, and move all words there.
    """
    if MODE == 2:
        LEFT: tl.constexpr = 2 - WIDTH * i
        moved = word << LEFT if LEFT > 0 else word >> (-LEFT)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            .reg .b64 at;
            mov.b64 {low, high}, $2;
            lop3.b32 low, $1, $3, low, 0xEA;
            mov.b64 at, {low, high};
            ld.global.nc.f32 $0, [at];
            }""",
            "=f,r,l,r",
            [moved, table.to(tl.int64), tl.full(word.shape, ((1 << WIDTH) - 1) << 2, tl.int32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.load(table + ((word >> (WIDTH * i)) & ((1 << WIDTH) - 1)))


@triton.jit
def code_value(
    word, i: tl.constexpr, table, WIDTH: tl.constexpr, DECODE: tl.constexpr, MODE: tl.constexpr
):
    """Return the value that the code in a field stands for, before zeros and scales, in float32."""
    if DECODE == 1:
        return table_value(word, i, table, WIDTH, MODE)
    if DECODE == 2:
        return float8_value(word, i)
    if DECODE == 3:
        return wide_float8_value(word, i)
    return ((word >> (WIDTH * i)) & ((1 << WIDTH) - 1)).to(tl.float32)


@triton.jit
def exact_code(
    word, i: tl.constexpr, less, kind: tl.constexpr, WIDTH: tl.constexpr, WIDEN: tl.constexpr
):
    """Return ``code - less`` of 16 bits, without a conversion: the field under the exponent of 128 or 1024."""
    BASE: tl.constexpr = 0x4300 if kind == tl.bfloat16 else 0x6400
    BIAS: tl.constexpr = 128.0 if kind == tl.bfloat16 else 1024.0
    field = (word >> (WIDTH * i)) & ((1 << WIDTH) - 1)
    number = (field | BASE).to(tl.int16).to(kind, bitcast=True)
    if WIDEN:
        number = number.to(tl.float32) - (less + BIAS)
    else:
        number = number - (less + BIAS).to(kind)
    return number


@triton.jit
def by_column(
    value, owner, group, mask, scales, d, lows, dmin, groups,
    LOW: tl.constexpr, CENTRE: tl.constexpr, ZERO: tl.constexpr, LEVELS: tl.constexpr,
    SUPER: tl.constexpr,
):  # fmt: skip
    """Compute ``(value - zero) * scale - low``, every column with the parameters of its own group."""
    if LOW == 0:
        value -= CENTRE
        if ZERO == 1:
            value -= parameter(lows, dmin, owner, group, mask, groups, 1, 1)
    value *= parameter(scales, d, owner, group, mask, groups, LEVELS, SUPER)
    if LOW == 0 and ZERO == 2:
        value -= parameter(lows, dmin, owner, group, mask, groups, LEVELS, SUPER)
    return value
