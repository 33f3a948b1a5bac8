"""Steps that compiled loops share: rounding, tables of values; and coding with what was chosen."""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import inner, jit
from quantforge.packers.ggml.panels import THRESHOLDS

LINE = 16  # floats of a cache line, and the smallest group
TOGETHER = 4  # columns between two visits to the sums

_MAGIC = numpy.float32(1.5 * 2**23)  # added and taken away, it rounds to an integer, halves to even
_ZERO, _ONE = numpy.float32(0), numpy.float32(1)


@inner
def look_up(s, ratios, values, count, low, middles, rises):  # type: ignore[no-untyped-def]
    """Fill ``count`` values of a table in; five thresholds at a time, as many as fit in registers."""
    for place in range(count):
        s[values + place] = low
    for first in range(0, THRESHOLDS, 5):
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
def rounded(ratio, low, high):  # type: ignore[no-untyped-def]
    """Round to the nearest integer, halves to even, and clamp."""
    value = (ratio + _MAGIC) - _MAGIC
    value = low if value < low else value
    return high if value > high else value


@jit
def encode(weight, step, offset, low, high, middles, rises, found):  # type: ignore[no-untyped-def]
    """Fill ``found`` with the nearest codes; see `lanes.encode`."""
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
            for first in range(group * size, group * size + size, LINE):
                for index in range(LINE):
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
                codes[place] = numpy.int8(numpy.int32(rounded(ratio, low, high)))
