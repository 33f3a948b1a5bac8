"""The loops of `strips` with numpy, for matrices too small to be worth compiling them.

Compiling takes seconds of every process, more than small matrices take to round. Every step is that of `strip_kernels`
in the same float32 arithmetic, so that both give the same bits: this is the text to read, and a test compares the
compiled loops with it.
"""

from __future__ import annotations

from typing import Any

import numpy
from numpy.typing import NDArray

Array = NDArray[Any]  # float32 [columns, rows] but where it says otherwise
Table = tuple[Array, Array, Array] | None

_ONE, _TWO = numpy.float32(1), numpy.float32(2)


class _Grid:
    """The points of all columns of a strip; see `Points`."""

    def __init__(
        self, scales: Array, zeros: Array, offsets: Array, low: Any, high: Any, table: Table
    ) -> None:
        self._steps, self._zeros, self._offsets = scales, zeros, offsets
        self._low, self._high, self._table = low, high, table
        # Where the step is 0 every code stands for the same value.
        self._divisors = numpy.where(scales == 0, _ONE, scales)

    def place(self, column: int, target: Array, code: Array, value: Array) -> None:
        """Fill in the code and the value of the point nearest to each ``target``."""
        offset, step = self._offsets[column], self._steps[column]
        numpy.subtract(target, offset, out=value)
        value /= self._divisors[column]
        if self._table is None:
            zero = self._zeros[column]
            numpy.rint(value, out=code)
            code += zero
            numpy.maximum(code, self._low, out=code)
            numpy.minimum(code, self._high, out=code)
            numpy.subtract(code, zero, out=value)
        else:
            middles, values, codes = self._table
            nearest = numpy.searchsorted(middles, value, side="right")
            value[:], code[:] = values[nearest], codes[nearest]
        value *= step
        value += offset


def round_columns(
    error: Array, pull: Array, triangle: Array, terms: Array, codes: Array, *grid: Any
) -> None:
    """Round a strip; see `strips.round_strip`."""
    points = _Grid(*grid)
    target, value, moved = (numpy.empty_like(part) for part in (error[0], error[0], error))
    for j, mine in enumerate(error):
        pivot, later = triangle[j, j], slice(j + 1, None)
        numpy.multiply(pull[j], _ONE / pivot, out=target)
        target += mine
        points.place(j, target, codes[j], value)
        numpy.subtract(target, value, out=terms[j])
        terms[j] *= pivot
        error[j] -= value
        pull[later] += numpy.multiply(triangle[j, later, None], mine, out=moved[later])


def improve_columns(
    gradient: Array,
    hessian: Array,
    weight: Array,
    error: Array,
    codes: Array,
    change: Array,
    gained: Array,  # float64 [rows]
    *grid: Any,
) -> None:
    """Move the codes of a strip; see `strips.improve_strip`."""
    points = _Grid(*grid)
    target, value, moved = (numpy.empty_like(part) for part in (error[0], error[0], error))
    for j, (slope, original, wrong) in enumerate(zip(gradient, weight, error, strict=True)):
        pivot, later, step = hessian[j, j], slice(j + 1, None), change[j]
        before = original - wrong
        numpy.multiply(slope, _ONE / pivot, out=target)
        target += before
        points.place(j, target, codes[j], value)
        numpy.subtract(value, before, out=step)
        numpy.subtract(original, value, out=wrong)
        gained += step * (_TWO * slope - pivot * step)
        gradient[later] -= numpy.multiply(hessian[j, later, None], step, out=moved[later])
