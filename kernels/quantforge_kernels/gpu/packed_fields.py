"""Decoding of the fields of packed words and loading of group parameters, shared by the kernels over bit planes.

``FIELD_MODE``: 0 converts integers to float; 1 sets an exponent above the field in plain Triton; 2 does the same with
``lop3`` in inline assembly. The interpreter runs 0 and 1; 1 and 2 give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def and_or(word, MASK: tl.constexpr, BASE: tl.constexpr, FIELD_MODE: tl.constexpr):
    """Compute ``(word & MASK) | BASE``, with FIELD_MODE 2 in one instruction."""
    if FIELD_MODE == 2:
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
def field_bias(FIELD: tl.constexpr, WIDTH: tl.constexpr, FIELD_MODE: tl.constexpr):
    """Return the bias that `biased_field` adds to the code."""
    if FIELD_MODE == 0:
        return 0.0
    if WIDTH == 8:
        return 256.0
    return (2048 >> (WIDTH * (FIELD % (8 // WIDTH)))) * 1.0


@triton.jit
def biased_field(word, FIELD: tl.constexpr, WIDTH: tl.constexpr, FIELD_MODE: tl.constexpr):
    """Return the code in a field plus `field_bias`, as float32."""
    MASK: tl.constexpr = (1 << WIDTH) - 1
    if FIELD_MODE == 0:
        return ((word >> (WIDTH * FIELD)) & MASK).to(tl.float32)
    BIT_POSITION: tl.constexpr = 15 if WIDTH == 8 else 12 + (WIDTH * FIELD) % 8
    BYTE: tl.constexpr = (WIDTH * FIELD) // 8
    LEFT_SHIFT: tl.constexpr = (15 if WIDTH == 8 else 12) - 8 * BYTE
    shifted = word << LEFT_SHIFT if LEFT_SHIFT > 0 else word >> (-LEFT_SHIFT)
    raw = and_or(shifted, MASK << BIT_POSITION, (150 - BIT_POSITION) << 23, FIELD_MODE)
    return raw.to(tl.float32, bitcast=True)


@triton.jit
def float8_e4m3_value(word, i: tl.constexpr):
    """Return the float8_e4m3fn in byte ``i`` as float32.

    Its sign and its other seven bits, shifted to their positions in float32, are the number times 2^-120,
    including subnormals. (NaN is rejected when weights are prepared.)
    """
    raw = ((word << (24 - 8 * i)) >> 4) & -0x78100000  # 0x87F00000
    return raw.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def float8_e5m2_value(word, i: tl.constexpr):
    """Return the float8_e5m2 in byte ``i`` as float32; infinities and NaN are rejected when weights are prepared."""
    raw = ((word << (24 - 8 * i)) >> 3) & -0x70200000  # 0x8FE00000
    return raw.to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2^112


@triton.jit
def load_parameter(
    base,
    superblock_base,
    row,
    group,
    mask,
    stride,
    SCALE_LEVELS: tl.constexpr,
    GROUPS_PER_SUPERBLOCK: tl.constexpr,
):
    """Load a scale, zero point or minimum in float32; with two levels, the product of both.

    ``SCALE_LEVELS``: 1 for one level; 2 for two; 3 for two with the lower one as pairs of 4 bits; 4 for two with the
    lower one as bytes of float8_e4m3fn.
    """
    if SCALE_LEVELS == 3:
        pair = tl.load(base + row * (stride // 2) + group // 2, mask=mask, other=0).to(tl.int32)
        value = ((pair >> (4 * (group % 2))) & 15).to(tl.float32)
    elif SCALE_LEVELS == 4:
        byte = tl.load(base + row * stride + group, mask=mask, other=0).to(tl.int32)
        value = float8_e4m3_value(byte, 0)
    else:
        value = tl.load(base + row * stride + group, mask=mask, other=0).to(tl.float32)
    if SCALE_LEVELS >= 2:
        offset = row * (stride // GROUPS_PER_SUPERBLOCK) + group // GROUPS_PER_SUPERBLOCK
        value *= tl.load(superblock_base + offset, mask=mask, other=0).to(tl.float32)
    return value


@triton.jit
def table_value(word, i: tl.constexpr, table, WIDTH: tl.constexpr, FIELD_MODE: tl.constexpr):
    """Load the entry of a 16-value codebook (aligned to 64 bytes) that a field selects.

    Assembly is used because Triton would give a separate load its own layout and move all words to it.
    """
    if FIELD_MODE == 2:
        LEFT_SHIFT: tl.constexpr = 2 - WIDTH * i
        shifted = word << LEFT_SHIFT if LEFT_SHIFT > 0 else word >> (-LEFT_SHIFT)
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
            [shifted, table.to(tl.int64), tl.full(word.shape, ((1 << WIDTH) - 1) << 2, tl.int32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.load(table + ((word >> (WIDTH * i)) & ((1 << WIDTH) - 1)))


@triton.jit
def code_value(
    word, i: tl.constexpr, table, WIDTH: tl.constexpr, GRID: tl.constexpr, FIELD_MODE: tl.constexpr
):
    """Return the value of the code in a field, before zeros and scales, in float32."""
    if GRID == 1:
        return table_value(word, i, table, WIDTH, FIELD_MODE)
    if GRID == 2:
        return float8_e4m3_value(word, i)
    if GRID == 3:
        return float8_e5m2_value(word, i)
    return ((word >> (WIDTH * i)) & ((1 << WIDTH) - 1)).to(tl.float32)


@triton.jit
def exact_code(
    word, i: tl.constexpr, zero, dtype: tl.constexpr, WIDTH: tl.constexpr, IN_FLOAT32: tl.constexpr
):
    """Return ``code - zero`` as a 16-bit number without conversion: the field under the exponent of 128 or 1024."""
    BASE: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
    BIAS: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    field = (word >> (WIDTH * i)) & ((1 << WIDTH) - 1)
    number = (field | BASE).to(tl.int16).to(dtype, bitcast=True)
    if IN_FLOAT32:
        number = number.to(tl.float32) - (zero + BIAS)
    else:
        number = number - (zero + BIAS).to(dtype)
    return number


@triton.jit
def scale_per_column(
    value, param_row, group, mask, scales, d, minima, dmin, groups,
    LOW_BIT: tl.constexpr, CENTER: tl.constexpr, ZERO_KIND: tl.constexpr, SCALE_LEVELS: tl.constexpr,
    GROUPS_PER_SUPERBLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``(value - zero) * scale - minimum`` with the parameters of each column's own group."""
    if LOW_BIT == 0:
        value -= CENTER
        if ZERO_KIND == 1:
            value -= load_parameter(minima, dmin, param_row, group, mask, groups, 1, 1)
    value *= load_parameter(
        scales, d, param_row, group, mask, groups, SCALE_LEVELS, GROUPS_PER_SUPERBLOCK
    )
    if LOW_BIT == 0 and ZERO_KIND == 2:
        value -= load_parameter(
            minima, dmin, param_row, group, mask, groups, SCALE_LEVELS, GROUPS_PER_SUPERBLOCK
        )
    return value
