"""The loops of `column_loops`, compiled by numba, each at its first call in a process.

All arrays are float32 ``[columns, rows]``, so that each innermost loop runs along rows: vector instructions.
"""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import inner, jit

TILE = 256  # rows: what a tile needs stays in a core's cache

_ZERO, _ONE, _TWO = numpy.float32(0), numpy.float32(1), numpy.float32(2)


@inner
def place(target, scale, zero, offset, low, high, table, code, value):  # type: ignore[no-untyped-def]
    """Fill in the code and the value of the point nearest to each ``target``; see `Points`."""
    if table is None:
        for row in range(target.shape[0]):
            step = scale[row]
            divisor = _ONE if step == _ZERO else step  # then every code stands for the same value
            point = numpy.rint((target[row] - offset[row]) / divisor) + zero[row]
            point = low if point < low else point
            point = high if point > high else point
            code[row] = point
            value[row] = (point - zero[row]) * step + offset[row]
    else:
        middles, values, codes = table[0], table[1], table[2]
        for row in range(target.shape[0]):
            step = scale[row]
            value[row] = (target[row] - offset[row]) / (_ONE if step == _ZERO else step)
            code[row] = _ZERO
        for index in range(middles.shape[0]):
            middle = middles[index]
            for row in range(target.shape[0]):
                code[row] += _ONE if value[row] >= middle else _ZERO
        for row in range(target.shape[0]):
            nearest = numpy.int32(code[row])
            value[row] = values[nearest] * scale[row] + offset[row]
            code[row] = codes[nearest]


@jit
def round_points(error, pull, triangle, terms, codes, scales, zeros, offsets, low, high, table):  # type: ignore[no-untyped-def]
    """Round a chunk; see `column_loops.round_chunk`."""
    columns, rows = error.shape
    target, value = numpy.empty(TILE, numpy.float32), numpy.empty(TILE, numpy.float32)
    for first in range(0, rows, TILE):
        last = min(first + TILE, rows)
        count = last - first
        for j in range(columns):
            pivot = triangle[j, j]
            inverse = _ONE / pivot
            mine, moved, term = error[j, first:last], pull[j, first:last], terms[j, first:last]
            for row in range(count):
                target[row] = mine[row] + moved[row] * inverse
            scale, zero, offset = (
                scales[j, first:last],
                zeros[j, first:last],
                offsets[j, first:last],
            )
            code = codes[j, first:last]
            place(target[:count], scale, zero, offset, low, high, table, code, value)
            for row in range(count):
                term[row] = (target[row] - value[row]) * pivot
                mine[row] -= value[row]
            for k in range(j + 1, columns):
                factor, later = triangle[j, k], pull[k, first:last]
                for row in range(count):
                    later[row] += factor * mine[row]


@jit
def improve_points(  # type: ignore[no-untyped-def]
    gradient,
    hessian,
    weight,
    error,
    codes,
    change,
    gained,
    scales,
    zeros,
    offsets,
    low,
    high,
    table,
):
    """Move the codes of a chunk; see `column_loops.improve_chunk`."""
    columns, rows = error.shape
    target, value = numpy.empty(TILE, numpy.float32), numpy.empty(TILE, numpy.float32)
    for first in range(0, rows, TILE):
        last = min(first + TILE, rows)
        count, fallen = last - first, gained[first:last]
        for j in range(columns):
            pivot = hessian[j, j]
            inverse = _ONE / pivot
            slope, original = gradient[j, first:last], weight[j, first:last]
            wrong, step = error[j, first:last], change[j, first:last]
            for row in range(count):
                target[row] = original[row] - wrong[row] + slope[row] * inverse
            scale, zero, offset = (
                scales[j, first:last],
                zeros[j, first:last],
                offsets[j, first:last],
            )
            code = codes[j, first:last]
            place(target[:count], scale, zero, offset, low, high, table, code, value)
            for row in range(count):
                step[row] = value[row] - (original[row] - wrong[row])
                wrong[row] = original[row] - value[row]
                fallen[row] += step[row] * (_TWO * slope[row] - pivot * step[row])
            for k in range(j + 1, columns):
                factor, later = hessian[j, k], gradient[k, first:last]
                for row in range(count):
                    later[row] -= factor * step[row]
