"""Steps of `reference_loops` before points are chosen: signs and magnitudes, and a scale for values above 0."""

from __future__ import annotations

import numpy

from quantforge.packers.ggml.panel_loops import borrowing
from quantforge.packers.lattices.eights import below, load, pick, spread, store
from quantforge.packers.lattices.near_loops import LANES, first_of

# 1.5 * 2^23: added and taken away, it rounds to an integer, halves to even.
_MAGIC = numpy.float32(12582912.0)
_ZERO, _ONE, _TENTH = numpy.float32(0), numpy.float32(1), numpy.float32(0.1)
_EPSILON = numpy.float32(1e-15)


@borrowing
def whole(value):  # type: ignore[no-untyped-def]
    """Round to the nearest integer, halves to even."""
    return (value + _MAGIC) - _MAGIC


@borrowing
def non_negative(x, w, most, digits):  # type: ignore[no-untyped-def]
    """Return the scale that ggml's search for values above 0 finds [make_qp_quants]; ``digits`` uint8 is scratch.

    Codes of values below 0 wrap around, as they do there.
    """
    size, top = len(x), numpy.float32(most)
    high = _ZERO
    for i in range(size):
        high = max(high, x[i])
    if high < _EPSILON:
        return _ZERO
    inverse = top / high
    scale, best = _ONE / inverse, _ZERO
    for i in range(size):
        wrapped = numpy.uint8(numpy.int32(whole(inverse * x[i])))
        diff = x[i] - scale * numpy.float32(wrapped)
        best += w[i] * diff * diff
    for tenth in range(-4, 5):
        if tenth == 0:
            continue
        tried = (_TENTH * numpy.float32(tenth) + top) / high
        scale, error = _ONE / tried, _ZERO
        for i in range(size):
            diff = x[i] - scale * min(top, whole(tried * x[i]))
            error += w[i] * diff * diff
        if error < best:
            best, inverse = error, tried
    sumlx, suml2 = _ZERO, _ZERO
    for i in range(size):
        code = min(top, whole(inverse * x[i]))
        digits[i] = numpy.uint8(numpy.int32(code))
        sumlx += w[i] * x[i] * code
        suml2 += w[i] * code * code
    for _ in range(5):
        changed = False
        for i in range(size):
            old = numpy.float32(digits[i])
            slx, sl2 = sumlx - w[i] * x[i] * old, suml2 - w[i] * old * old
            if not (slx > _ZERO and sl2 > _ZERO):
                continue
            new = min(top, whole(x[i] * sl2 / slx))
            if new == old:
                continue
            slx += w[i] * x[i] * new
            sl2 += w[i] * new * new
            if slx * slx * suml2 > sumlx * sumlx * sl2:
                digits[i] = numpy.uint8(numpy.int32(new))
                sumlx, suml2, changed = slx, sl2, True
        if not changed:
            break
    return sumlx / suml2 if suml2 > _ZERO else _ZERO


@borrowing
def turned(x, w, size, even, values, signs):  # type: ignore[no-untyped-def]
    """Fill in magnitudes and signs; with ``even`` the cheapest of 8 values keeps the wrong sign where needed."""
    zero = spread(_ZERO)
    for first in range(0, size, 8):
        value = load(x, first)
        store(values, first, pick(value, zero, zero - value, value))
        mask = below(value, zero)
        odd = mask ^ mask >> 4
        odd ^= odd >> 2
        odd ^= odd >> 1
        if even and odd & 1:
            least, _ = first_of(load(w, first) * value * value, load(LANES, 0))
            values[first + least] = -values[first + least]
            mask ^= 1 << least
        signs[first // 8] = mask
