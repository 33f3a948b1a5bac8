"""Triton kernels over bit planes (see `layout`): `matvec_kernel`, `rows_kernel` and `decode_kernel`.

**One row** (`matvec_kernel`), or one row and each of its owners (`grouped`).
Reading the weights is all that should take time: at 4 bits an H100 or H200 delivers about 40 weights
per clock and multiprocessor, which has 128 lanes for floating point and 64 for integers, so that
about three instructions per weight are affordable. Hence

* no conversion from integer to float: under the right exponent a field *is* a float. Bits
  ``[p, p + w)`` of a word, all others cleared, with the exponent of ``2^(23 - p)`` read as
  ``2^(23 - p) + q``. One shift serves two 4-bit fields (``p`` = 12 and 16), one ``lop3`` each masks
  and sets the exponent, one multiply-add uses it;
* the bias and the zero point leave the loop: ``sum (bias + q - z) x`` needs the sums of ``x`` alone,
  which all rows share. In float32 the largest bias, 2^11, costs about ``2^-24 2^11 / 5`` of the
  result, a tenth of what bfloat16 keeps; float32 activations take the plain conversion instead;
* a scale multiplies the sum over a word, not every field.

**A few rows** (`rows_kernel`). Fields become numbers of the type of ``x`` and go to the tensor cores
(``tl.dot``); weights are read once for 16 rows. Where a tile lies in one group its scale multiplies
the products, and fields are exact 16-bit numbers under the exponent of 128 or 1024.

**Many rows**: `decode_kernel` writes the matrix, and the library multiplies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantforge_kernels.gpu.fields import (
    bias_of,
    biased_field,
    by_column,
    code_value,
    exact_code,
    float8_value,
    parameter,
    table_value,
    wide_float8_value,
)


@triton.jit
def _field_value(
    word, i: tl.constexpr, table, WIDTH: tl.constexpr, DECODE: tl.constexpr, MODE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Return the value of the code in a field, in float32; of an integer, the code plus its `bias_of`."""
    if DECODE == 1:
        return table_value(word, i, table, WIDTH, MODE)
    if DECODE == 2:
        return float8_value(word, i)
    if DECODE == 3:
        return wide_float8_value(word, i)
    return biased_field(word, i, WIDTH, EXACT)


@triton.jit
def _with_parameters(
    total, biased, plain, scales_ptr, d_ptr, lows_ptr, dmin_ptr, scaled, group, live, groups,
    LOW: tl.constexpr, ZERO: tl.constexpr, LEVELS: tl.constexpr, SUPER: tl.constexpr,
    DECODE: tl.constexpr,
):  # fmt: skip
    """Return sums over words ``[rows, chunks, words]``, each in one group, with its zero, scale and minimum.

    ``plain`` are the sums of x over the columns of a word, ``biased`` those of x times what was added to the codes.
    """
    if DECODE == 0:
        total -= biased[None, :, :]
    if LOW == 0 and ZERO == 1:
        zero = parameter(lows_ptr, dmin_ptr, scaled[:, None], group, live, groups, 1, 1)
        total -= zero[:, :, None] * plain[None, :, :]
    scale = parameter(scales_ptr, d_ptr, scaled[:, None], group, live, groups, LEVELS, SUPER)
    total *= scale[:, :, None]
    if LOW == 0 and ZERO == 2:
        low = parameter(lows_ptr, dmin_ptr, scaled[:, None], group, live, groups, LEVELS, SUPER)
        total -= low[:, :, None] * plain[None, :, :]
    return total


@triton.jit
def _plane_sums(
    words_ptr, x_ptr, table_ptr, scales_ptr, d_ptr, lows_ptr, dmin_ptr,
    row, scaled, tile, last, columns, quads, groups,
    WIDTH: tl.constexpr, LOW: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, CENTRE: tl.constexpr, ZERO: tl.constexpr,
    LEVELS: tl.constexpr, SUPER: tl.constexpr, DECODE: tl.constexpr, MODE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum one plane of a tile: scaled partial sums ``[rows, chunks, words of a chunk]``.

    ``LOW`` is the lowest bit of the plane in the code. The zero point belongs to plane 0. ``scaled`` are
    the rows of the parameters, ``last`` the end of the chunks that are this program's.
    """
    FIELDS: tl.constexpr = 32 // WIDTH
    STEP: tl.constexpr = CHUNK // FIELDS  # words of a chunk; columns from a field to the next
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK
    EXACT: tl.constexpr = MODE if WHOLE else 0
    chunk = tl.arange(0, CHUNKS)
    begin = tile * BLOCK_K + chunk * CHUNK
    column = begin[:, None] + tl.arange(0, STEP)[None, :]
    place = tile * (BLOCK_K // FIELDS) + tl.arange(0, BLOCK_K // FIELDS)
    words = words_ptr + row[:, None] * (quads * 4) + place[None, :]
    live = (begin < last)[None, :]
    if EVEN:
        word = tl.load(words, eviction_policy="evict_first")
    else:
        there = (place < last // FIELDS)[None, :]
        word = tl.load(words, mask=there, other=0, eviction_policy="evict_first")
    # Of three dimensions some versions of Triton spread a warp over the rows: each would convert all of x.
    word = tl.reshape(word, (row.shape[0], CHUNKS, STEP))
    total = tl.zeros((row.shape[0], CHUNKS, STEP), tl.float32)
    biased = tl.zeros((CHUNKS, STEP), tl.float32)  # sums of x alone, which all rows share
    plain = tl.zeros((CHUNKS, STEP), tl.float32)
    for i in tl.static_range(FIELDS):
        at = column + i * STEP
        if EVEN:
            x = tl.load(x_ptr + at).to(tl.float32)
        else:
            x = tl.load(x_ptr + at, mask=at < tl.minimum(last, columns), other=0.0).to(tl.float32)
        value = _field_value(word, i, table_ptr, WIDTH, DECODE, MODE, EXACT)
        if not WHOLE:
            near = ((at < columns) & (at < last))[None, :, :]
            value = by_column(
                value, scaled[:, None, None], (at // GROUP)[None, :, :], near, scales_ptr, d_ptr,
                lows_ptr, dmin_ptr, groups, LOW, CENTRE, ZERO, LEVELS, SUPER,
            )  # fmt: skip
        total += value * x[None, :, :]
        plain += x
        biased += (bias_of(i, WIDTH, EXACT) + (CENTRE if LOW == 0 else 0)) * x
    if WHOLE:
        total = _with_parameters(
            total, biased, plain, scales_ptr, d_ptr, lows_ptr, dmin_ptr, scaled, (begin // GROUP)[None, :],
            live, groups, LOW, ZERO, LEVELS, SUPER, DECODE,
        )  # fmt: skip
    return total * (1 << LOW)


@triton.jit
def matvec_kernel(
    x_ptr, words0, words1, words2, table, scales, d, lows, dmin, out_ptr, owners_ptr,
    rows, columns, groups, quads0, quads1, quads2, tiles,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    CENTRE: tl.constexpr, ZERO: tl.constexpr, LEVELS: tl.constexpr, SUPER: tl.constexpr,
    DECODE: tl.constexpr, TILE_ROWS: tl.constexpr, MODE: tl.constexpr, EACH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute ``out[split, m, n]``, the sums over the columns of a split; a program does ``BLOCK_N`` rows.

    ``tiles``: tiles of ``BLOCK_K`` columns in a split. A width of 0 is no plane. ``EVEN``: tiles
    fill the columns exactly, so that nothing needs a mask; rows beyond the last repeat it.
    ``EACH``: 0, or (`grouped`) the number of owners of a row; then ``m`` is a pair, and weights are those of its owner.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m, split = tl.program_id(1), tl.program_id(2)
    row = tl.minimum(n, rows - 1).to(tl.int64)
    scaled = row // TILE_ROWS
    if EACH > 0:
        owner = tl.load(owners_ptr + m).to(tl.int64)
        row += owner * rows
        scaled += owner * tl.cdiv(rows, TILE_ROWS)
        x_ptr += (m // EACH) * columns
    else:
        x_ptr += m * columns
    end = tl.cdiv(columns, CHUNK) * CHUNK
    last = tl.minimum((split + 1) * tiles * BLOCK_K, end)
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK
    sum0 = tl.zeros((BLOCK_N, CHUNKS, CHUNK * WIDTH0 // 32), tl.float32)
    if WIDTH1 > 0:
        sum1 = tl.zeros((BLOCK_N, CHUNKS, CHUNK * WIDTH1 // 32), tl.float32)
    if WIDTH2 > 0:
        sum2 = tl.zeros((BLOCK_N, CHUNKS, CHUNK * WIDTH2 // 32), tl.float32)
    for tile in range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(end, BLOCK_K))):
        sum0 += _plane_sums(
            words0, x_ptr, table, scales, d, lows, dmin,
            row, scaled, tile, last, columns, quads0, groups,
            WIDTH0, 0, CHUNK, GROUP, WHOLE, EVEN, CENTRE, ZERO, LEVELS, SUPER, DECODE, MODE, BLOCK_K,
        )  # fmt: skip
        if WIDTH1 > 0:
            sum1 += _plane_sums(
                words1, x_ptr, table, scales, d, lows, dmin,
                row, scaled, tile, last, columns, quads1, groups,
                WIDTH1, WIDTH0, CHUNK, GROUP, WHOLE, EVEN, CENTRE, ZERO, LEVELS, SUPER, DECODE, MODE, BLOCK_K,
            )  # fmt: skip
        if WIDTH2 > 0:
            sum2 += _plane_sums(
                words2, x_ptr, table, scales, d, lows, dmin,
                row, scaled, tile, last, columns, quads2, groups,
                WIDTH2, WIDTH0 + WIDTH1, CHUNK, GROUP, WHOLE, EVEN, CENTRE, ZERO, LEVELS, SUPER,
                DECODE, MODE, BLOCK_K,
            )  # fmt: skip
    total = tl.sum(tl.sum(sum0, axis=2), axis=1)
    if WIDTH1 > 0:
        total += tl.sum(tl.sum(sum1, axis=2), axis=1)
    if WIDTH2 > 0:
        total += tl.sum(tl.sum(sum2, axis=2), axis=1)
    place = (split * tl.num_programs(1) + m) * rows + n
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=n < rows)


@triton.jit
def _centred_code(
    word, i: tl.constexpr, table, zero, kind: tl.constexpr, WIDTH: tl.constexpr,
    DECODE: tl.constexpr, MODE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return the value of the code in a field less the zero point, as a number of 16 bits (or 32) of type ``kind``."""
    if DECODE == 0 and WIDTH < 8 and (kind == tl.bfloat16 or kind == tl.float16):
        return exact_code(word, i, zero, kind, WIDTH, WIDEN)
    return (code_value(word, i, table, WIDTH, DECODE, MODE) - zero).to(kind)


@triton.jit
def _plane_product(
    total, words_ptr, x_ptr, table, scales, d, lows, dmin,
    row, scaled, m, tokens, tile, last, columns, quads, groups,
    WIDTH: tl.constexpr, LOW: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    WHOLE: tl.constexpr, CENTRE: tl.constexpr, ZERO: tl.constexpr, LEVELS: tl.constexpr,
    SUPER: tl.constexpr, DECODE: tl.constexpr, MODE: tl.constexpr, AFTER: tl.constexpr,
    WIDEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add one plane of a tile times ``x`` to ``total`` ``[rows, tokens]``.

    ``AFTER``: a tile lies in one group, so that its scale multiplies the products and not the codes.
    """
    FIELDS: tl.constexpr = 32 // WIDTH
    STEP: tl.constexpr = CHUNK // FIELDS
    owner = scaled[:, None]
    j = tl.arange(0, BLOCK_K // FIELDS)
    column = tile * BLOCK_K + (j // STEP) * CHUNK + j % STEP
    words = words_ptr + row[:, None] * (quads * 4) + (tile * (BLOCK_K // FIELDS) + j)[None, :]
    there = (column < last)[None, :]
    word = tl.load(words, mask=there, other=0, eviction_policy="evict_first")
    zero = tl.full((1, 1), CENTRE if LOW == 0 else 0, tl.float32)
    if AFTER:
        group = tl.full((1, 1), 0, tl.int32) + tile * BLOCK_K // GROUP
        inside = group < groups
    else:
        group = ((tile * BLOCK_K + (j // STEP) * CHUNK) // GROUP)[None, :]
        inside = there
    if WHOLE:
        scale = parameter(scales, d, owner, group, inside, groups, LEVELS, SUPER) * (1 << LOW)
        if LOW == 0 and ZERO == 1:
            zero = parameter(lows, dmin, owner, group, inside, groups, 1, 1)
        if LOW == 0 and ZERO == 2:
            low = parameter(lows, dmin, owner, group, inside, groups, LEVELS, SUPER)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    part = tl.zeros(total.shape, tl.float32)
    for i in tl.static_range(FIELDS):
        at = column + i * STEP
        live = (at < last) & (at < columns)
        place = m[None, :] * columns + at[:, None]
        x = tl.load(x_ptr + place, mask=live[:, None] & (m < tokens)[None, :], other=0.0)
        if AFTER:
            weight = _centred_code(word, i, table, zero, kind, WIDTH, DECODE, MODE, WIDEN)
        elif WHOLE:
            value = (code_value(word, i, table, WIDTH, DECODE, MODE) - zero) * scale
            if LOW == 0 and ZERO == 2:
                value -= low
            weight = value.to(kind)
        else:
            value = by_column(
                code_value(word, i, table, WIDTH, DECODE, MODE) * (1 << LOW), owner, (at // GROUP)[None, :],
                live[None, :], scales, d, lows, dmin, groups, LOW, CENTRE, ZERO, LEVELS, SUPER,
            )  # fmt: skip
            weight = value.to(kind)
        if WIDEN:
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        part = tl.dot(weight, x, part, input_precision="ieee")
    if AFTER:
        part *= scale
    return total + part


@triton.jit
def _owned(
    order_ptr, starts_ptr, tokens, matrices,
    EACH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return the owner of this program, its pairs, and their rows; of places without a pair the row ``tokens``.

    Where there is no owner left, that is the number ``matrices``.

    The pairs of every owner are cut into tiles of ``BLOCK_M``; ``BLOCK_E`` is not below the number of matrices.
    """
    tile = tl.program_id(1)
    number = tl.arange(0, BLOCK_E)
    known = number < matrices
    first = tl.load(starts_ptr + number, mask=known, other=0)
    after = tl.load(starts_ptr + number + 1, mask=known, other=0)
    ends = tl.cumsum((after - first + BLOCK_M - 1) // BLOCK_M, 0)
    passed = ends <= tile  # of owners before this one; all where no pair is left
    owner = tl.sum(tl.where(known & passed, 1, 0), 0)
    before = tl.max(tl.where(passed, ends, 0), 0)
    last = tl.minimum(owner, matrices - 1)
    begin = tl.load(starts_ptr + last) + (tile - before) * BLOCK_M
    end = tl.where(owner < matrices, tl.load(starts_ptr + last + 1), 0)
    place = begin + tl.arange(0, BLOCK_M)
    there = place < end
    pair = tl.load(order_ptr + place, mask=there, other=0)
    return owner.to(tl.int64), pair.to(tl.int64), tl.where(there, pair // EACH, tokens)


@triton.jit
def rows_kernel(
    x_ptr, words0, words1, words2, table, scales, d, lows, dmin, out_ptr, order_ptr, starts_ptr,
    tokens, pairs, matrices, rows, columns, groups, quads0, quads1, quads2, tiles,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, CENTRE: tl.constexpr,
    ZERO: tl.constexpr, LEVELS: tl.constexpr, SUPER: tl.constexpr, DECODE: tl.constexpr,
    TILE_ROWS: tl.constexpr, MODE: tl.constexpr, AFTER: tl.constexpr, WIDEN: tl.constexpr,
    EACH: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute ``out[split, m, n]`` for ``BLOCK_M`` tokens at a time, with the weights as the left operand.

    Unless ``AFTER``, the weights are rounded to the type of ``x``, as a decoded matrix would be.
    ``WIDEN``: the interpreter computes nothing in bfloat16. ``EACH``: 0, or (`grouped`) the number of owners of a row;
    then a program does pairs of one owner, and there may be programs without any.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    row = tl.minimum(n, rows - 1).to(tl.int64)
    scaled = row // TILE_ROWS
    if EACH > 0:
        owner, pair, m = _owned(order_ptr, starts_ptr, tokens, matrices, EACH, BLOCK_E, BLOCK_M)
        row += owner * rows
        scaled += owner * tl.cdiv(rows, TILE_ROWS)
    else:
        m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = m
    end = tl.cdiv(columns, CHUNK) * CHUNK
    last = tl.minimum((split + 1) * tiles * BLOCK_K, end)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    stop = tl.minimum((split + 1) * tiles, tl.cdiv(end, BLOCK_K))
    if EACH > 0:
        stop = tl.where(owner < matrices, stop, 0)  # nothing is read where no pair is left
    for tile in range(split * tiles, stop):
        total = _plane_product(
            total, words0, x_ptr, table, scales, d, lows, dmin,
            row, scaled, m, tokens, tile, last, columns, quads0, groups,
            WIDTH0, 0, CHUNK, GROUP, WHOLE, CENTRE, ZERO, LEVELS, SUPER, DECODE,
            MODE, AFTER, WIDEN, BLOCK_K,
        )  # fmt: skip
        if WIDTH1 > 0:
            total = _plane_product(
                total, words1, x_ptr, table, scales, d, lows, dmin,
                row, scaled, m, tokens, tile, last, columns, quads1, groups,
                WIDTH1, WIDTH0, CHUNK, GROUP, WHOLE, CENTRE, ZERO, LEVELS, SUPER, DECODE,
                MODE, AFTER, WIDEN, BLOCK_K,
            )  # fmt: skip
        if WIDTH2 > 0:
            total = _plane_product(
                total, words2, x_ptr, table, scales, d, lows, dmin,
                row, scaled, m, tokens, tile, last, columns, quads2, groups,
                WIDTH2, WIDTH0 + WIDTH1, CHUNK, GROUP, WHOLE, CENTRE, ZERO, LEVELS, SUPER, DECODE,
                MODE, AFTER, WIDEN, BLOCK_K,
            )  # fmt: skip
    place = split * pairs * rows + pair[None, :] * rows + n[:, None]
    mask = (m < tokens)[None, :] & (n < rows)[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _plane_codes(words_ptr, row, column, quads, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Return the fields of a plane, column by column."""
    STEP: tl.constexpr = CHUNK * WIDTH // 32
    place = column % CHUNK
    words = row * (quads * 4) + (column // CHUNK) * STEP + place % STEP
    return (tl.load(words_ptr + words) >> (WIDTH * (place // STEP))) & ((1 << WIDTH) - 1)


@triton.jit
def decode_kernel(
    words0, words1, words2, table, scales, d, lows, dmin, out_ptr,
    rows, columns, groups, quads0, quads1, quads2,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, CENTRE: tl.constexpr, ZERO: tl.constexpr,
    LEVELS: tl.constexpr, SUPER: tl.constexpr, DECODE: tl.constexpr, TILE_ROWS: tl.constexpr,
    MODE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the weight ``[rows, columns]`` in the type of ``out``."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = tl.minimum(n, rows - 1).to(tl.int64)[:, None]
    column = tl.minimum(k, columns - 1)[None, :]
    code = _plane_codes(words0, row, column, quads0, WIDTH0, CHUNK)
    if WIDTH1 > 0:
        code |= _plane_codes(words1, row, column, quads1, WIDTH1, CHUNK) << WIDTH0
    if WIDTH2 > 0:
        code |= _plane_codes(words2, row, column, quads2, WIDTH2, CHUNK) << (WIDTH0 + WIDTH1)
    mask = (n < rows)[:, None] & (k < columns)[None, :]
    value = by_column(
        code_value(code, 0, table, 8, DECODE, MODE), row // TILE_ROWS, column // GROUP, mask,
        scales, d, lows, dmin, groups, 0, CENTRE, ZERO, LEVELS, SUPER,
    )  # fmt: skip
    place = n.to(tl.int64)[:, None] * columns + k[None, :]
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=mask)
