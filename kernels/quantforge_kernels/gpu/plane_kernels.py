"""Triton kernels over bit planes (see `layout`): `matvec_kernel`, `matmul_kernel` and `decode_kernel`.

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

**A few rows** (`matmul_kernel`). Fields become numbers of the type of ``x`` and go to the tensor cores
(``tl.dot``); weights are read once for 16 rows. Where a tile lies in one group its scale multiplies
the products, and fields are exact 16-bit numbers under the exponent of 128 or 1024.

**Many rows**: `decode_kernel` writes the matrix, and the library multiplies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantforge_kernels.gpu.packed_fields import (
    biased_field,
    code_value,
    exact_code,
    field_bias,
    float8_e4m3_value,
    float8_e5m2_value,
    load_parameter,
    scale_per_column,
    table_value,
)


@triton.jit
def _field_value(
    word, i: tl.constexpr, table, WIDTH: tl.constexpr, GRID: tl.constexpr, FIELD_MODE: tl.constexpr,
    EFFECTIVE_MODE: tl.constexpr,
):  # fmt: skip
    """Return the value of the code in a field, in float32; for integers, the code plus its `field_bias`."""
    if GRID == 1:
        return table_value(word, i, table, WIDTH, FIELD_MODE)
    if GRID == 2:
        return float8_e4m3_value(word, i)
    if GRID == 3:
        return float8_e5m2_value(word, i)
    return biased_field(word, i, WIDTH, EFFECTIVE_MODE)


@triton.jit
def _apply_parameters(
    total, biased_sums, x_sums, scales_ptr, d_ptr, minima_ptr, dmin_ptr, param_row, group, valid, groups,
    LOW_BIT: tl.constexpr, ZERO_KIND: tl.constexpr, SCALE_LEVELS: tl.constexpr, GROUPS_PER_SUPERBLOCK: tl.constexpr,
    GRID: tl.constexpr,
):  # fmt: skip
    """Apply zero, scale and minimum to sums over words ``[rows, chunks, words]``, each of which lies in one group.

    ``x_sums`` are the sums of x over the columns of a word, ``biased_sums`` those of x times the bias of the codes.
    """
    if GRID == 0:
        total -= biased_sums[None, :, :]
    if LOW_BIT == 0 and ZERO_KIND == 1:
        zero = load_parameter(minima_ptr, dmin_ptr, param_row[:, None], group, valid, groups, 1, 1)
        total -= zero[:, :, None] * x_sums[None, :, :]
    scale = load_parameter(
        scales_ptr,
        d_ptr,
        param_row[:, None],
        group,
        valid,
        groups,
        SCALE_LEVELS,
        GROUPS_PER_SUPERBLOCK,
    )
    total *= scale[:, :, None]
    if LOW_BIT == 0 and ZERO_KIND == 2:
        low = load_parameter(
            minima_ptr,
            dmin_ptr,
            param_row[:, None],
            group,
            valid,
            groups,
            SCALE_LEVELS,
            GROUPS_PER_SUPERBLOCK,
        )
        total -= low[:, :, None] * x_sums[None, :, :]
    return total


@triton.jit
def _plane_sums(
    words_ptr, x_ptr, table_ptr, scales_ptr, d_ptr, minima_ptr, dmin_ptr,
    row, param_row, tile, last, columns, row_stride, groups,
    WIDTH: tl.constexpr, LOW_BIT: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    WORD_IN_GROUP: tl.constexpr, UNMASKED: tl.constexpr, CENTER: tl.constexpr, ZERO_KIND: tl.constexpr,
    SCALE_LEVELS: tl.constexpr, GROUPS_PER_SUPERBLOCK: tl.constexpr, GRID: tl.constexpr, FIELD_MODE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum one plane of a tile: scaled partial sums ``[rows, chunks, words of a chunk]``.

    ``LOW_BIT`` is the lowest bit of the plane in the code. The zero point belongs to plane 0. ``param_row`` are
    the rows of the parameters, ``last`` is the end of this program's chunks.
    """
    FIELDS: tl.constexpr = 32 // WIDTH
    STEP: tl.constexpr = CHUNK // FIELDS  # words of a chunk; columns from a field to the next
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK
    EFFECTIVE_MODE: tl.constexpr = FIELD_MODE if WORD_IN_GROUP else 0
    chunk = tl.arange(0, CHUNKS)
    first_column = tile * BLOCK_K + chunk * CHUNK
    column = first_column[:, None] + tl.arange(0, STEP)[None, :]
    offset = tile * (BLOCK_K // FIELDS) + tl.arange(0, BLOCK_K // FIELDS)
    word_ptrs = words_ptr + row[:, None] * (row_stride * 4) + offset[None, :]
    valid = (first_column < last)[None, :]
    if UNMASKED:
        word = tl.load(word_ptrs, eviction_policy="evict_first")
    else:
        valid_words = (offset < last // FIELDS)[None, :]
        word = tl.load(word_ptrs, mask=valid_words, other=0, eviction_policy="evict_first")
    # Of three dimensions some versions of Triton spread a warp over the rows: each would convert all of x.
    word = tl.reshape(word, (row.shape[0], CHUNKS, STEP))
    total = tl.zeros((row.shape[0], CHUNKS, STEP), tl.float32)
    biased_sums = tl.zeros((CHUNKS, STEP), tl.float32)  # sums of x alone, which all rows share
    x_sums = tl.zeros((CHUNKS, STEP), tl.float32)
    for i in tl.static_range(FIELDS):
        column_at = column + i * STEP
        if UNMASKED:
            x = tl.load(x_ptr + column_at).to(tl.float32)
        else:
            x = tl.load(
                x_ptr + column_at, mask=column_at < tl.minimum(last, columns), other=0.0
            ).to(tl.float32)
        value = _field_value(word, i, table_ptr, WIDTH, GRID, FIELD_MODE, EFFECTIVE_MODE)
        if not WORD_IN_GROUP:
            in_range = ((column_at < columns) & (column_at < last))[None, :, :]
            value = scale_per_column(
                value, param_row[:, None, None], (column_at // GROUP)[None, :, :], in_range, scales_ptr, d_ptr,
                minima_ptr, dmin_ptr, groups, LOW_BIT, CENTER, ZERO_KIND, SCALE_LEVELS, GROUPS_PER_SUPERBLOCK,
            )  # fmt: skip
        total += value * x[None, :, :]
        x_sums += x
        biased_sums += (field_bias(i, WIDTH, EFFECTIVE_MODE) + (CENTER if LOW_BIT == 0 else 0)) * x
    if WORD_IN_GROUP:
        total = _apply_parameters(
            total, biased_sums, x_sums, scales_ptr, d_ptr, minima_ptr, dmin_ptr, param_row,
            (first_column // GROUP)[None, :],
            valid, groups, LOW_BIT, ZERO_KIND, SCALE_LEVELS, GROUPS_PER_SUPERBLOCK, GRID,
        )  # fmt: skip
    return total * (1 << LOW_BIT)


@triton.jit
def matvec_kernel(
    x_ptr, words0, words1, words2, table, scales, d, minima, dmin, out_ptr, experts_ptr,
    rows, columns, groups, row_stride0, row_stride1, row_stride2, tiles,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, WORD_IN_GROUP: tl.constexpr, UNMASKED: tl.constexpr,
    CENTER: tl.constexpr, ZERO_KIND: tl.constexpr, SCALE_LEVELS: tl.constexpr, GROUPS_PER_SUPERBLOCK: tl.constexpr,
    GRID: tl.constexpr, TILE_ROWS: tl.constexpr, FIELD_MODE: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute ``out[split, m, n]``, the sums over the columns of a split, for ``BLOCK_N`` rows per program.

    ``tiles``: tiles of ``BLOCK_K`` columns in a split. A width of 0 means that there is no such plane. ``UNMASKED``:
    tiles fill the columns exactly, so that no masks are needed; rows beyond the last repeat it. ``TOP_K``: 0, or for
    grouped products the number of experts per row; then ``m`` is a pair, multiplied by its expert.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m, split = tl.program_id(1), tl.program_id(2)
    row = tl.minimum(n, rows - 1).to(tl.int64)
    param_row = row // TILE_ROWS
    if TOP_K > 0:
        expert = tl.load(experts_ptr + m).to(tl.int64)
        row += expert * rows
        param_row += expert * tl.cdiv(rows, TILE_ROWS)
        x_ptr += (m // TOP_K) * columns
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
            words0, x_ptr, table, scales, d, minima, dmin,
            row, param_row, tile, last, columns, row_stride0, groups,
            WIDTH0, 0, CHUNK, GROUP, WORD_IN_GROUP, UNMASKED, CENTER, ZERO_KIND, SCALE_LEVELS,
            GROUPS_PER_SUPERBLOCK, GRID, FIELD_MODE, BLOCK_K,
        )  # fmt: skip
        if WIDTH1 > 0:
            sum1 += _plane_sums(
                words1, x_ptr, table, scales, d, minima, dmin,
                row, param_row, tile, last, columns, row_stride1, groups,
                WIDTH1, WIDTH0, CHUNK, GROUP, WORD_IN_GROUP, UNMASKED, CENTER, ZERO_KIND, SCALE_LEVELS,
                GROUPS_PER_SUPERBLOCK, GRID, FIELD_MODE, BLOCK_K,
            )  # fmt: skip
        if WIDTH2 > 0:
            sum2 += _plane_sums(
                words2, x_ptr, table, scales, d, minima, dmin,
                row, param_row, tile, last, columns, row_stride2, groups,
                WIDTH2, WIDTH0 + WIDTH1, CHUNK, GROUP, WORD_IN_GROUP, UNMASKED, CENTER, ZERO_KIND,
                SCALE_LEVELS, GROUPS_PER_SUPERBLOCK,
                GRID, FIELD_MODE, BLOCK_K,
            )  # fmt: skip
    total = tl.sum(tl.sum(sum0, axis=2), axis=1)
    if WIDTH1 > 0:
        total += tl.sum(tl.sum(sum1, axis=2), axis=1)
    if WIDTH2 > 0:
        total += tl.sum(tl.sum(sum2, axis=2), axis=1)
    offset = (split * tl.num_programs(1) + m) * rows + n
    tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=n < rows)


@triton.jit
def _centered_code(
    word, i: tl.constexpr, table, zero, dtype: tl.constexpr, WIDTH: tl.constexpr,
    GRID: tl.constexpr, FIELD_MODE: tl.constexpr, DOT_IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Return the value of the code in a field minus the zero point, as a number of type ``dtype``."""
    if GRID == 0 and WIDTH < 8 and (dtype == tl.bfloat16 or dtype == tl.float16):
        return exact_code(word, i, zero, dtype, WIDTH, DOT_IN_FLOAT32)
    return (code_value(word, i, table, WIDTH, GRID, FIELD_MODE) - zero).to(dtype)


@triton.jit
def _plane_product(
    total, words_ptr, x_ptr, table, scales, d, minima, dmin,
    row, param_row, m, tokens, tile, last, columns, row_stride, groups,
    WIDTH: tl.constexpr, LOW_BIT: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    WORD_IN_GROUP: tl.constexpr, CENTER: tl.constexpr, ZERO_KIND: tl.constexpr, SCALE_LEVELS: tl.constexpr,
    GROUPS_PER_SUPERBLOCK: tl.constexpr, GRID: tl.constexpr, FIELD_MODE: tl.constexpr, SCALE_AFTER_DOT: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the product of one plane of a tile and ``x`` to ``total`` ``[rows, tokens]``.

    ``SCALE_AFTER_DOT``: a tile lies in one group, so that its scale multiplies the products instead of the codes.
    """
    FIELDS: tl.constexpr = 32 // WIDTH
    STEP: tl.constexpr = CHUNK // FIELDS
    expert = param_row[:, None]
    j = tl.arange(0, BLOCK_K // FIELDS)
    column = tile * BLOCK_K + (j // STEP) * CHUNK + j % STEP
    word_ptrs = (
        words_ptr + row[:, None] * (row_stride * 4) + (tile * (BLOCK_K // FIELDS) + j)[None, :]
    )
    valid_words = (column < last)[None, :]
    word = tl.load(word_ptrs, mask=valid_words, other=0, eviction_policy="evict_first")
    zero = tl.full((1, 1), CENTER if LOW_BIT == 0 else 0, tl.float32)
    if SCALE_AFTER_DOT:
        group = tl.full((1, 1), 0, tl.int32) + tile * BLOCK_K // GROUP
        group_valid = group < groups
    else:
        group = ((tile * BLOCK_K + (j // STEP) * CHUNK) // GROUP)[None, :]
        group_valid = valid_words
    if WORD_IN_GROUP:
        scale = load_parameter(
            scales, d, expert, group, group_valid, groups, SCALE_LEVELS, GROUPS_PER_SUPERBLOCK
        ) * (1 << LOW_BIT)
        if LOW_BIT == 0 and ZERO_KIND == 1:
            zero = load_parameter(minima, dmin, expert, group, group_valid, groups, 1, 1)
        if LOW_BIT == 0 and ZERO_KIND == 2:
            low = load_parameter(
                minima,
                dmin,
                expert,
                group,
                group_valid,
                groups,
                SCALE_LEVELS,
                GROUPS_PER_SUPERBLOCK,
            )
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    block_sum = tl.zeros(total.shape, tl.float32)
    for i in tl.static_range(FIELDS):
        column_at = column + i * STEP
        valid = (column_at < last) & (column_at < columns)
        offset = m[None, :] * columns + column_at[:, None]
        x = tl.load(x_ptr + offset, mask=valid[:, None] & (m < tokens)[None, :], other=0.0)
        if SCALE_AFTER_DOT:
            weight = _centered_code(
                word, i, table, zero, dtype, WIDTH, GRID, FIELD_MODE, DOT_IN_FLOAT32
            )
        elif WORD_IN_GROUP:
            value = (code_value(word, i, table, WIDTH, GRID, FIELD_MODE) - zero) * scale
            if LOW_BIT == 0 and ZERO_KIND == 2:
                value -= low
            weight = value.to(dtype)
        else:
            value = scale_per_column(
                code_value(word, i, table, WIDTH, GRID, FIELD_MODE) * (1 << LOW_BIT), expert,
                (column_at // GROUP)[None, :],
                valid[None, :], scales, d, minima, dmin, groups, LOW_BIT, CENTER, ZERO_KIND,
                SCALE_LEVELS, GROUPS_PER_SUPERBLOCK,
            )  # fmt: skip
            weight = value.to(dtype)
        if DOT_IN_FLOAT32:
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        block_sum = tl.dot(weight, x, block_sum, input_precision="ieee")
    if SCALE_AFTER_DOT:
        block_sum *= scale
    return total + block_sum


@triton.jit
def _find_expert_tile(
    order_ptr, starts_ptr, tokens, num_matrices,
    TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return this program's expert, its pairs, and their rows of x; positions without a pair get the row ``tokens``.

    The pairs of every expert are cut into tiles of ``BLOCK_M``. Programs beyond the last tile get the expert
    ``num_matrices``. ``BLOCK_E`` is at least the number of matrices.
    """
    tile = tl.program_id(1)
    number = tl.arange(0, BLOCK_E)
    is_expert = number < num_matrices
    first = tl.load(starts_ptr + number, mask=is_expert, other=0)
    after = tl.load(starts_ptr + number + 1, mask=is_expert, other=0)
    ends = tl.cumsum((after - first + BLOCK_M - 1) // BLOCK_M, 0)
    is_passed = ends <= tile  # of owners before this one; all where no pair is left
    expert = tl.sum(tl.where(is_expert & is_passed, 1, 0), 0)
    tiles_before = tl.max(tl.where(is_passed, ends, 0), 0)
    last = tl.minimum(expert, num_matrices - 1)
    first_column = tl.load(starts_ptr + last) + (tile - tiles_before) * BLOCK_M
    end = tl.where(expert < num_matrices, tl.load(starts_ptr + last + 1), 0)
    offset = first_column + tl.arange(0, BLOCK_M)
    valid_words = offset < end
    pair = tl.load(order_ptr + offset, mask=valid_words, other=0)
    return expert.to(tl.int64), pair.to(tl.int64), tl.where(valid_words, pair // TOP_K, tokens)


@triton.jit
def matmul_kernel(
    x_ptr, words0, words1, words2, table, scales, d, minima, dmin, out_ptr, order_ptr, starts_ptr,
    tokens, pairs, num_matrices, rows, columns, groups, row_stride0, row_stride1, row_stride2, tiles,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, WORD_IN_GROUP: tl.constexpr, CENTER: tl.constexpr,
    ZERO_KIND: tl.constexpr, SCALE_LEVELS: tl.constexpr, GROUPS_PER_SUPERBLOCK: tl.constexpr, GRID: tl.constexpr,
    TILE_ROWS: tl.constexpr, FIELD_MODE: tl.constexpr, SCALE_AFTER_DOT: tl.constexpr, DOT_IN_FLOAT32: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute ``out[split, m, n]`` for ``BLOCK_M`` tokens at a time on tensor cores; weights are the left operand.

    Unless ``SCALE_AFTER_DOT``, the weights are rounded to the type of ``x``, as a decoded matrix would be.
    ``DOT_IN_FLOAT32``: for the interpreter, which cannot compute in bfloat16. ``TOP_K``: 0, or for grouped products the
    number of experts per row; then a program handles pairs of one expert, and some programs may have none.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    row = tl.minimum(n, rows - 1).to(tl.int64)
    param_row = row // TILE_ROWS
    if TOP_K > 0:
        expert, pair, m = _find_expert_tile(
            order_ptr, starts_ptr, tokens, num_matrices, TOP_K, BLOCK_E, BLOCK_M
        )
        row += expert * rows
        param_row += expert * tl.cdiv(rows, TILE_ROWS)
    else:
        m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = m
    end = tl.cdiv(columns, CHUNK) * CHUNK
    last = tl.minimum((split + 1) * tiles * BLOCK_K, end)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    stop = tl.minimum((split + 1) * tiles, tl.cdiv(end, BLOCK_K))
    if TOP_K > 0:
        stop = tl.where(expert < num_matrices, stop, 0)  # nothing is read where no pair is left
    for tile in range(split * tiles, stop):
        total = _plane_product(
            total, words0, x_ptr, table, scales, d, minima, dmin,
            row, param_row, m, tokens, tile, last, columns, row_stride0, groups,
            WIDTH0, 0, CHUNK, GROUP, WORD_IN_GROUP, CENTER, ZERO_KIND, SCALE_LEVELS, GROUPS_PER_SUPERBLOCK, GRID,
            FIELD_MODE, SCALE_AFTER_DOT, DOT_IN_FLOAT32, BLOCK_K,
        )  # fmt: skip
        if WIDTH1 > 0:
            total = _plane_product(
                total, words1, x_ptr, table, scales, d, minima, dmin,
                row, param_row, m, tokens, tile, last, columns, row_stride1, groups,
                WIDTH1, WIDTH0, CHUNK, GROUP, WORD_IN_GROUP, CENTER, ZERO_KIND, SCALE_LEVELS,
                GROUPS_PER_SUPERBLOCK, GRID,
                FIELD_MODE, SCALE_AFTER_DOT, DOT_IN_FLOAT32, BLOCK_K,
            )  # fmt: skip
        if WIDTH2 > 0:
            total = _plane_product(
                total, words2, x_ptr, table, scales, d, minima, dmin,
                row, param_row, m, tokens, tile, last, columns, row_stride2, groups,
                WIDTH2, WIDTH0 + WIDTH1, CHUNK, GROUP, WORD_IN_GROUP, CENTER, ZERO_KIND, SCALE_LEVELS,
                GROUPS_PER_SUPERBLOCK, GRID,
                FIELD_MODE, SCALE_AFTER_DOT, DOT_IN_FLOAT32, BLOCK_K,
            )  # fmt: skip
    offset = split * pairs * rows + pair[None, :] * rows + n[:, None]
    mask = (m < tokens)[None, :] & (n < rows)[:, None]
    tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_plane_codes(words_ptr, row, column, row_stride, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Load the fields of a plane for rows and columns."""
    STEP: tl.constexpr = CHUNK * WIDTH // 32
    offset = column % CHUNK
    word_offsets = row * (row_stride * 4) + (column // CHUNK) * STEP + offset % STEP
    return (tl.load(words_ptr + word_offsets) >> (WIDTH * (offset // STEP))) & ((1 << WIDTH) - 1)


@triton.jit
def decode_kernel(
    words0, words1, words2, table, scales, d, minima, dmin, out_ptr,
    rows, columns, groups, row_stride0, row_stride1, row_stride2,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, CENTER: tl.constexpr, ZERO_KIND: tl.constexpr,
    SCALE_LEVELS: tl.constexpr, GROUPS_PER_SUPERBLOCK: tl.constexpr, GRID: tl.constexpr, TILE_ROWS: tl.constexpr,
    FIELD_MODE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Decode the weight to ``[rows, columns]`` in the type of ``out``."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = tl.minimum(n, rows - 1).to(tl.int64)[:, None]
    column = tl.minimum(k, columns - 1)[None, :]
    code = _load_plane_codes(words0, row, column, row_stride0, WIDTH0, CHUNK)
    if WIDTH1 > 0:
        code |= _load_plane_codes(words1, row, column, row_stride1, WIDTH1, CHUNK) << WIDTH0
    if WIDTH2 > 0:
        code |= _load_plane_codes(words2, row, column, row_stride2, WIDTH2, CHUNK) << (
            WIDTH0 + WIDTH1
        )
    mask = (n < rows)[:, None] & (k < columns)[None, :]
    value = scale_per_column(
        code_value(code, 0, table, 8, GRID, FIELD_MODE), row // TILE_ROWS, column // GROUP, mask,
        scales, d, minima, dmin, groups, 0, CENTER, ZERO_KIND, SCALE_LEVELS, GROUPS_PER_SUPERBLOCK,
    )  # fmt: skip
    offset = n.to(tl.int64)[:, None] * columns + k[None, :]
    tl.store(out_ptr + offset, value.to(out_ptr.dtype.element_ty), mask=mask)
