"""Loops over the blocks of a row for `lanes`, compiled by numba: types that need no search, and bytes.

A block has 32 columns, or a multiple of 32. Its range has to be known before its codes, and finding it takes most of
the time: 32 values become one.
"""

from __future__ import annotations

import numba
import numpy
from llvmlite import ir
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from quantforge.numerics.compiled import jit
from quantforge.packers.ggml.panels import AFFINE, MAGNITUDE

_ZERO, _HALF = numpy.float32(0), numpy.float32(0.5)
_ONE, _TWO = numpy.float32(1), numpy.float32(2)


@intrinsic
def extremes(typing, x, first):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the least and the greatest of the 32 floats of ``x`` from ``first`` on, by halving vectors.

    A loop would not become vector instructions, since it would have to keep the sign of zeros. Here a zero that is
    returned has the sign of any of the zeros; if all 32 are equal, that of the first.
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
def cover(rows, kind, low, high, scales, mins, codes):  # type: ignore[no-untyped-def]
    """Cover the range of each block; see `lanes.cover`."""
    size = rows.shape[1] // scales.shape[1]
    for row in range(rows.shape[0]):
        for block in range(scales.shape[1]):
            x = rows[row, block * size : block * size + size]
            bottom, top = extremes(x, 0)
            for first in range(32, size, 32):
                least, most = extremes(x, first)
                bottom = least if least < bottom else bottom
                top = most if most > top else top
            if bottom == _ZERO:  # the first one, as ggml has it: one may be negative
                for index in range(size - 1, -1, -1):
                    bottom = x[index] if x[index] == _ZERO else bottom
            if kind == AFFINE:
                scale, start, middle = (top - bottom) / high, bottom, _HALF
            elif kind == MAGNITUDE:
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
                if kind == MAGNITUDE:
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


@jit
def join_nibbles(heads, codes, out):  # type: ignore[no-untyped-def]
    """Write what each block begins with, then its codes; see `lanes.with_nibbles`."""
    begins = heads.shape[1]
    for block in range(out.shape[0]):
        for index in range(begins):
            out[block, index] = heads[block, index]
        for index in range(8):
            high = codes[block, index + 8] << numpy.uint16(4)
            out[block, begins + index] = codes[block, index] | high


@jit
def cover_mxfp4(rows, exponents, steps, middles, codes):  # type: ignore[no-untyped-def]
    """Round each 32 columns under their power of two: magnitudes among ``middles``, signs in the fourth bit."""
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
