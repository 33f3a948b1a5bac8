"""Loops over rows, compiled by numba: types that need no search, codes for chosen steps, and nibbles.

A block has 32 columns, or a multiple of 32. Its range has to be known before its codes, and finding it takes most of
the time: 32 values become one.
"""

from __future__ import annotations

import numba
import numpy
from llvmlite import ir
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from quantforge.numerics.compiled import inner, jit
from quantforge.packers.ggml.grid import MAX_THRESHOLDS

CACHE_LINE_FLOATS = 16  # floats of a cache line, and the smallest group
_MAGIC = numpy.float32(1.5 * 2**23)  # added and subtracted, it rounds to an integer, halves to even
_ZERO, _HALF = numpy.float32(0), numpy.float32(0.5)
_ONE, _TWO = numpy.float32(1), numpy.float32(2)


@jit
def cover_range(rows, affine, magnitude, low, high, scales, mins, codes):  # type: ignore[no-untyped-def]
    """Cover the range of each block with codes, without a search.

    With ``affine`` the least and greatest values go to the first and last code, with ``magnitude`` the largest
    magnitude to the last code and halves away from 0, else the first value of largest magnitude to the lowest code.

    Args:
        rows: float32 ``[rows, columns]``.
        affine, magnitude: see above.
        low, high: the least and greatest code.
        scales, mins: float32 ``[rows, blocks]``, filled in, as are
        codes: int8 ``[rows, columns]``.
    """
    size = rows.shape[1] // scales.shape[1]
    for row in range(rows.shape[0]):
        for block in range(scales.shape[1]):
            x = rows[row, block * size : block * size + size]
            bottom, top = _extremes(x, 0)
            for first in range(32, size, 32):
                least, most = _extremes(x, first)
                bottom = least if least < bottom else bottom
                top = most if most > top else top
            if bottom == _ZERO:  # the first one, as ggml has it: one may be negative
                for index in range(size - 1, -1, -1):
                    bottom = x[index] if x[index] == _ZERO else bottom
            if affine:
                scale, start, middle = (top - bottom) / high, bottom, _HALF
            elif magnitude:
                scale, start, middle = abs(top if top > -bottom else bottom) / high, _ZERO, _ZERO
            else:
                extreme = top if top > -bottom else bottom
                if top == _ZERO and bottom == _ZERO:
                    extreme = _ZERO
                elif top == -bottom:
                    for index in range(size - 1, -1, -1):
                        extreme = x[index] if abs(x[index]) == top else extreme
                scale, start, middle = extreme / low, _ZERO, _HALF - low
            scales[row, block], mins[row, block] = scale, start
            inverse = _ZERO if scale == _ZERO else _ONE / scale
            limit = high + middle - _HALF
            for first in range(0, size, 32):
                part, code = x[first : first + 32], codes[row, block * size + first :][:32]
                if magnitude:
                    for index in range(32):
                        ratio = part[index] * inverse
                        whole = numpy.int32(ratio)
                        whole += numpy.int32((ratio - numpy.float32(whole)) * _TWO)
                        code[index] = numpy.int8(whole)
                else:
                    for index in range(32):
                        ratio = (part[index] - start) * inverse + middle
                        ratio = limit if ratio > limit else ratio
                        code[index] = numpy.int8(numpy.int32(ratio) - numpy.int32(middle))


@intrinsic
def _extremes(typing, x, first):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the least and the greatest of the 32 floats of ``x`` from ``first`` on, by halving vectors.

    A loop would not become vector instructions, since it would have to keep the sign of zeros. A zero that is
    returned here has the sign of any of the zeros; if all 32 are equal, that of the first.
    """

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]
        array = make_array(signature.args[0])(context, build, arguments[0])
        kind = ir.VectorType(ir.FloatType(), 32)
        whole = build.load(
            build.bitcast(build.gep(array.data, [arguments[1]]), kind.as_pointer()), align=4
        )
        found = []
        for order in "<", ">":
            part = whole
            while (count := part.type.count // 2) > 0:
                low, high = (
                    build.shuffle_vector(
                        part,
                        ir.Constant(part.type, ir.Undefined),
                        ir.Constant(
                            ir.VectorType(ir.IntType(32), count), [*range(start, start + count)]
                        ),
                    )
                    for start in (0, count)
                )
                part = build.select(build.fcmp_ordered(order, high, low), high, low)
            found.append(build.extract_element(part, ir.Constant(ir.IntType(32), 0)))
        return context.make_tuple(build, signature.return_type, found)

    return numba.types.UniTuple(numba.float32, 2)(x, first), generate


@jit
def cover_mxfp4(rows, exponents, steps, middles, codes):  # type: ignore[no-untyped-def]
    """Round each 32 columns under their power of two: the nearest size, and the sign in the fourth bit.

    Args:
        rows: float32 ``[rows, columns]``.
        exponents: of each block, uint8 ``[rows, blocks]``.
        steps: of each exponent, ``[256]``.
        middles: between the sizes, ``[7]``; a value that is one of them gets the smaller size.
        codes: int8 ``[rows, columns]``, filled in.
    """
    m0, m1, m2, m3 = middles[0], middles[1], middles[2], middles[3]
    m4, m5, m6 = middles[4], middles[5], middles[6]
    for row in range(rows.shape[0]):
        for block in range(exponents.shape[1]):
            x = rows[row, block * 32 : block * 32 + 32]
            code = codes[row, block * 32 : block * 32 + 32]
            step = steps[exponents[row, block]]
            for index in range(32):
                value = x[index]
                size = abs(value) / step
                low = numpy.int32(size > m0) + numpy.int32(size > m1) + numpy.int32(size > m2)
                high = numpy.int32(size > m3) + numpy.int32(size > m4) + numpy.int32(size > m5)
                found = low + high + numpy.int32(size > m6)
                sign = numpy.int32(8) if value < _ZERO else numpy.int32(0)
                code[index] = numpy.int8(found + (sign if found > 0 else numpy.int32(0)))


@jit
def encode(weight, step, offset, low, high, middles, rises, found):  # type: ignore[no-untyped-def]
    """Fill ``found`` with the nearest codes of ``weight`` ``[rows, columns]``.

    Args:
        weight: float32 ``[rows, columns]``.
        step, offset: float32 ``[rows, groups]``; ``offset`` may be empty.
        low, high, middles, rises: `grid.code_thresholds`.
        found: int8 ``[rows, columns]``, filled in.
    """
    columns, groups = weight.shape[1], step.shape[1]
    size = columns // groups
    # Of each column, so that the loop over them is one run of vector instructions.
    units, starts = numpy.empty(columns, numpy.float32), numpy.zeros(columns, numpy.float32)
    ratios = numpy.empty(2 * columns if middles is not None else 0, numpy.float32)
    for row in range(weight.shape[0]):
        x, codes = weight[row], found[row]
        for group in range(groups):
            unit = step[row, group]
            unit = _ONE if unit == _ZERO else unit
            for first in range(group * size, group * size + size, CACHE_LINE_FLOATS):
                for index in range(CACHE_LINE_FLOATS):
                    units[first + index] = unit
                    if offset.size:
                        starts[first + index] = offset[row, group]
        if middles is not None:
            for place in range(columns):
                ratios[place] = (x[place] - starts[place]) / units[place]
            look_up(ratios, 0, columns, columns, low, middles, rises)
            for place in range(columns):
                codes[place] = numpy.int8(numpy.int32(ratios[columns + place]))
        else:
            for place in range(columns):
                ratio = (x[place] - starts[place]) / units[place]
                codes[place] = numpy.int8(numpy.int32(round_and_clamp(ratio, low, high)))


@inner
def look_up(s, ratios, values, count, low, middles, rises):  # type: ignore[no-untyped-def]
    """Fill in ``count`` values of a table; five thresholds at a time, as many as fit in registers."""
    for place in range(count):
        s[values + place] = low
    for first in range(0, MAX_THRESHOLDS, 5):
        m0, m1, m2 = middles[first], middles[first + 1], middles[first + 2]
        m3, m4 = middles[first + 3], middles[first + 4]
        r0, r1, r2 = rises[first], rises[first + 1], rises[first + 2]
        r3, r4 = rises[first + 3], rises[first + 4]
        for place in range(count):
            ratio, value = s[ratios + place], s[values + place]
            value += r0 if ratio >= m0 else _ZERO
            value += r1 if ratio >= m1 else _ZERO
            value += r2 if ratio >= m2 else _ZERO
            value += r3 if ratio >= m3 else _ZERO
            value += r4 if ratio >= m4 else _ZERO
            s[values + place] = value


@inner
def round_and_clamp(ratio, low, high):  # type: ignore[no-untyped-def]
    """Round to the nearest integer, halves to even, and clamp."""
    value = (ratio + _MAGIC) - _MAGIC
    value = low if value < low else value
    return high if value > high else value


@jit
def join_nibbles(heads, codes, out):  # type: ignore[no-untyped-def]
    """Write what each block begins with, then its codes below 16, of which ``j`` and ``j + 16`` share a byte.

    Arrays hold 16 bits at a time: ``heads`` ``[blocks, n]``, ``codes`` ``[blocks, 16]``, ``out`` ``[blocks, n + 8]``.
    """
    begins = heads.shape[1]
    for block in range(out.shape[0]):
        for index in range(begins):
            out[block, index] = heads[block, index]
        for index in range(8):
            high = codes[block, index + 8] << numpy.uint16(4)
            out[block, begins + index] = codes[block, index] | high
