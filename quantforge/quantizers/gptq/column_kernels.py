"""Loops of `column_loops` compiled by numba, each at its first call in a process.

All arrays are float32 ``[columns, rows]``, so that each innermost loop runs along rows and is vectorized.
"""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import internal_jit, jit

TILE = 256  # rows; the data of a tile stays in a core's cache

_ZERO, _ONE, _TWO = numpy.float32(0), numpy.float32(1), numpy.float32(2)


@internal_jit
def round_to_point(target, scale, zero, offset, low, high, table, code, value):  # type: ignore[no-untyped-def]
    """Fill in the code and the value of the grid point nearest to each ``target``; see `ColumnGrid`."""
    if table is None:
        for row in range(target.shape[0]):
            step = scale[row]
            divisor = _ONE if step == _ZERO else step  # all codes have the same value then
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
def round_points(  # type: ignore[no-untyped-def]
    error, compensation, triangle, terms, codes, scales, zeros, offsets, low, high, table
):
    """Round a chunk of columns; see `column_loops.round_chunk`."""
    columns, rows = error.shape
    target, value = numpy.empty(TILE, numpy.float32), numpy.empty(TILE, numpy.float32)
    for first in range(0, rows, TILE):
        last = min(first + TILE, rows)
        count = last - first
        for j in range(columns):
            pivot = triangle[j, j]
            inverse = _ONE / pivot
            column_error, target_offset, term = (
                error[j, first:last],
                compensation[j, first:last],
                terms[j, first:last],
            )
            for row in range(count):
                target[row] = column_error[row] + target_offset[row] * inverse
            scale, zero, offset = (
                scales[j, first:last],
                zeros[j, first:last],
                offsets[j, first:last],
            )
            code = codes[j, first:last]
            round_to_point(target[:count], scale, zero, offset, low, high, table, code, value)
            for row in range(count):
                term[row] = (target[row] - value[row]) * pivot
                column_error[row] -= value[row]
            for k in range(j + 1, columns):
                factor, later_columns = triangle[j, k], compensation[k, first:last]
                for row in range(count):
                    later_columns[row] += factor * column_error[row]


@jit
def improve_points(  # type: ignore[no-untyped-def]
    gradient,
    hessian,
    weight,
    error,
    codes,
    change,
    error_decrease,
    scales,
    zeros,
    offsets,
    low,
    high,
    table,
):
    """Update the codes of a chunk of columns; see `column_loops.improve_chunk`."""
    columns, rows = error.shape
    target, value = numpy.empty(TILE, numpy.float32), numpy.empty(TILE, numpy.float32)
    for first in range(0, rows, TILE):
        last = min(first + TILE, rows)
        count, row_decrease = last - first, error_decrease[first:last]
        for j in range(columns):
            pivot = hessian[j, j]
            inverse = _ONE / pivot
            column_gradient, original = gradient[j, first:last], weight[j, first:last]
            column_error, step = error[j, first:last], change[j, first:last]
            for row in range(count):
                target[row] = original[row] - column_error[row] + column_gradient[row] * inverse
            scale, zero, offset = (
                scales[j, first:last],
                zeros[j, first:last],
                offsets[j, first:last],
            )
            code = codes[j, first:last]
            round_to_point(target[:count], scale, zero, offset, low, high, table, code, value)
            for row in range(count):
                step[row] = value[row] - (original[row] - column_error[row])
                column_error[row] = original[row] - value[row]
                row_decrease[row] += step[row] * (_TWO * column_gradient[row] - pivot * step[row])
            for k in range(j + 1, columns):
                factor, later_columns = hessian[j, k], gradient[k, first:last]
                for row in range(count):
                    later_columns[row] -= factor * step[row]
