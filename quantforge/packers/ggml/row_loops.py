"""Loops over rows, compiled by numba: types that need no search, codes for given steps, and nibbles.

A block has 32 columns, or a multiple of 32. Its range must be known before its codes, and finding it takes most of
the time.
"""

from __future__ import annotations

import numba
import numpy
from llvmlite import ir
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from quantforge.numerics.compiled import internal_jit, jit
from quantforge.packers.ggml.grid import MAX_THRESHOLDS

CACHE_LINE_FLOATS = 16  # floats of a cache line, and the smallest group
# Adding and subtracting it rounds to an integer, halves to even
_MAGIC = numpy.float32(1.5 * 2**23)
_ZERO, _HALF = numpy.float32(0), numpy.float32(0.5)
_ONE, _TWO = numpy.float32(1), numpy.float32(2)


@jit
def cover_range(rows, affine, cover_magnitude, low, high, scales, mins, codes):  # type: ignore[no-untyped-def]
    """Choose scales and codes that cover the range of each block, without a search.

    With ``affine`` the smallest and the largest value get the first and the last code. With ``cover_magnitude`` the
    largest magnitude gets the last code, and halves round away from 0. Otherwise the first value of largest magnitude
    gets the lowest code.

    Args:
        rows: float32 ``[rows, columns]``.
        affine, cover_magnitude: see above.
        low, high: the smallest and the largest code.
        scales, mins: output, float32 ``[rows, blocks]``.
        codes: output, int8 ``[rows, columns]``.
    """
    size = rows.shape[1] // scales.shape[1]
    for row in range(rows.shape[0]):
        for block in range(scales.shape[1]):
            x = rows[row, block * size : block * size + size]
            minimum, maximum = _extremes(x, 0)
            for first in range(32, size, 32):
                chunk_min, chunk_max = _extremes(x, first)
                minimum = chunk_min if chunk_min < minimum else minimum
                maximum = chunk_max if chunk_max > maximum else maximum
            if minimum == _ZERO:  # the first one, as ggml has it: one may be negative
                for index in range(size - 1, -1, -1):
                    minimum = x[index] if x[index] == _ZERO else minimum
            if affine:
                scale, start, rounding = (maximum - minimum) / high, minimum, _HALF
            elif cover_magnitude:
                scale = abs(maximum if maximum > -minimum else minimum) / high
                start = _ZERO
                rounding = _ZERO
            else:
                extreme = maximum if maximum > -minimum else minimum
                if maximum == _ZERO and minimum == _ZERO:
                    extreme = _ZERO
                elif maximum == -minimum:
                    for index in range(size - 1, -1, -1):
                        extreme = x[index] if abs(x[index]) == maximum else extreme
                scale, start, rounding = extreme / low, _ZERO, _HALF - low
            scales[row, block], mins[row, block] = scale, start
            inverse = _ZERO if scale == _ZERO else _ONE / scale
            limit = high + rounding - _HALF
            for first in range(0, size, 32):
                values, code = x[first : first + 32], codes[row, block * size + first :][:32]
                if cover_magnitude:
                    for index in range(32):
                        ratio = values[index] * inverse
                        rounded = numpy.int32(ratio)
                        rounded += numpy.int32((ratio - numpy.float32(rounded)) * _TWO)
                        code[index] = numpy.int8(rounded)
                else:
                    for index in range(32):
                        ratio = (values[index] - start) * inverse + rounding
                        ratio = limit if ratio > limit else ratio
                        code[index] = numpy.int8(numpy.int32(ratio) - numpy.int32(rounding))


@intrinsic
def _extremes(typing, x, first):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the minimum and the maximum of the 32 floats of ``x`` from index ``first``, by halving vectors.

    A loop would not become vector instructions, since it would have to preserve the sign of zeros. A zero that is
    returned here has the sign of any of the zeros; if all 32 are equal, that of the first.
    """

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]
        array = make_array(signature.args[0])(context, build, arguments[0])
        kind = ir.VectorType(ir.FloatType(), 32)
        full_vector = build.load(
            build.bitcast(build.gep(array.data, [arguments[1]]), kind.as_pointer()), align=4
        )
        extremes = []
        for order in "<", ">":
            half_vector = full_vector
            while (count := half_vector.type.count // 2) > 0:
                low, high = (
                    build.shuffle_vector(
                        half_vector,
                        ir.Constant(half_vector.type, ir.Undefined),
                        ir.Constant(
                            ir.VectorType(ir.IntType(32), count), [*range(start, start + count)]
                        ),
                    )
                    for start in (0, count)
                )
                half_vector = build.select(build.fcmp_ordered(order, high, low), high, low)
            extremes.append(build.extract_element(half_vector, ir.Constant(ir.IntType(32), 0)))
        return context.make_tuple(build, signature.return_type, extremes)

    return numba.types.UniTuple(numba.float32, 2)(x, first), generate


@jit
def cover_mxfp4(rows, exponents, steps, thresholds, codes):  # type: ignore[no-untyped-def]
    """Encode each 32 columns under their power-of-two step: the nearest magnitude, and the sign in the fourth bit.

    Args:
        rows: float32 ``[rows, columns]``.
        exponents: exponent of each block, uint8 ``[rows, blocks]``.
        steps: step of each exponent, ``[256]``.
        thresholds: midpoints between the magnitudes, ``[7]``; a value at a midpoint gets the smaller magnitude.
        codes: output, int8 ``[rows, columns]``.
    """
    m0, m1, m2, m3 = thresholds[0], thresholds[1], thresholds[2], thresholds[3]
    m4, m5, m6 = thresholds[4], thresholds[5], thresholds[6]
    for row in range(rows.shape[0]):
        for block in range(exponents.shape[1]):
            x = rows[row, block * 32 : block * 32 + 32]
            code = codes[row, block * 32 : block * 32 + 32]
            step = steps[exponents[row, block]]
            for index in range(32):
                value = x[index]
                magnitude = abs(value) / step
                low_count = (
                    numpy.int32(magnitude > m0)
                    + numpy.int32(magnitude > m1)
                    + numpy.int32(magnitude > m2)
                )
                high_count = (
                    numpy.int32(magnitude > m3)
                    + numpy.int32(magnitude > m4)
                    + numpy.int32(magnitude > m5)
                )
                level = low_count + high_count + numpy.int32(magnitude > m6)
                sign = numpy.int32(8) if value < _ZERO else numpy.int32(0)
                code[index] = numpy.int8(level + (sign if level > 0 else numpy.int32(0)))


@jit
def encode(weight, step, offset, low, high, thresholds, increments, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` with the nearest codes of ``weight`` ``[rows, columns]``.

    Args:
        weight: float32 ``[rows, columns]``.
        step, offset: float32 ``[rows, groups]``; ``offset`` may be empty.
        low, high, thresholds, increments: as `grid.code_thresholds` returns them.
        out: output, int8 ``[rows, columns]``.
    """
    columns, groups = weight.shape[1], step.shape[1]
    size = columns // groups
    # Of each column, so that the loop over them is one run of vector instructions.
    divisors, offsets = numpy.empty(columns, numpy.float32), numpy.zeros(columns, numpy.float32)
    ratios = numpy.empty(2 * columns if thresholds is not None else 0, numpy.float32)
    for row in range(weight.shape[0]):
        x, codes = weight[row], out[row]
        for group in range(groups):
            divisor = step[row, group]
            divisor = _ONE if divisor == _ZERO else divisor
            for first in range(group * size, group * size + size, CACHE_LINE_FLOATS):
                for index in range(CACHE_LINE_FLOATS):
                    divisors[first + index] = divisor
                    if offset.size:
                        offsets[first + index] = offset[row, group]
        if thresholds is not None:
            for column in range(columns):
                ratios[column] = (x[column] - offsets[column]) / divisors[column]
            look_up(ratios, 0, columns, columns, low, thresholds, increments)
            for column in range(columns):
                codes[column] = numpy.int8(numpy.int32(ratios[columns + column]))
        else:
            for column in range(columns):
                ratio = (x[column] - offsets[column]) / divisors[column]
                codes[column] = numpy.int8(numpy.int32(round_and_clamp(ratio, low, high)))


@internal_jit
def look_up(s, ratios, values, count, low, thresholds, increments):  # type: ignore[no-untyped-def]
    """Look up ``count`` values in a table, comparing with five thresholds at a time, as many as fit in registers."""
    for index in range(count):
        s[values + index] = low
    for first in range(0, MAX_THRESHOLDS, 5):
        m0, m1, m2 = thresholds[first], thresholds[first + 1], thresholds[first + 2]
        m3, m4 = thresholds[first + 3], thresholds[first + 4]
        r0, r1, r2 = increments[first], increments[first + 1], increments[first + 2]
        r3, r4 = increments[first + 3], increments[first + 4]
        for index in range(count):
            ratio, value = s[ratios + index], s[values + index]
            value += r0 if ratio >= m0 else _ZERO
            value += r1 if ratio >= m1 else _ZERO
            value += r2 if ratio >= m2 else _ZERO
            value += r3 if ratio >= m3 else _ZERO
            value += r4 if ratio >= m4 else _ZERO
            s[values + index] = value


@internal_jit
def round_and_clamp(ratio, low, high):  # type: ignore[no-untyped-def]
    """Round to the nearest integer, halves to even, and clamp."""
    value = (ratio + _MAGIC) - _MAGIC
    value = low if value < low else value
    return high if value > high else value


@jit
def join_nibbles(headers, codes, out):  # type: ignore[no-untyped-def]
    """Write the header of each block, then its codes below 16, of which ``j`` and ``j + 16`` share a byte.

    Arrays hold 16 bits at a time: ``headers`` ``[blocks, n]``, ``codes`` ``[blocks, 16]``, ``out`` ``[blocks, n + 8]``.
    """
    header_words = headers.shape[1]
    for block in range(out.shape[0]):
        for index in range(header_words):
            out[block, index] = headers[block, index]
        for index in range(8):
            high = codes[block, index + 8] << numpy.uint16(4)
            out[block, header_words + index] = codes[block, index] | high
