"""The nearest of a few points, to the last bit as ggml finds it: 8 side by side, each in the order of its values.

Points lie as in `neighbours`. Of equal distances the first point is taken.
"""

from __future__ import annotations

import numpy

from quantforge.packers.ggml.panel_loops import borrowing
from quantforge.packers.lattices.eights import (
    below,
    first_bit,
    fused,
    greater,
    least,
    lesser,
    load,
    pick,
    spread,
    store,
    total,
)

# Of distances by sums, by the greatest that they are made of: more than both ways of measuring them can differ.
MARGIN = numpy.float32(256 * 2.0**-24)
# Beyond these scales and margins, numbers could leave the range in which that holds.
LEAST, SMALL, HUGE = numpy.float32(1e-10), numpy.float32(1e-30), numpy.float32(1e10)
_LARGEST = numpy.float32(3.4028234663852886e38)
_ZERO, _ONE, _EIGHT = numpy.float32(0), numpy.float32(1), numpy.float32(8)
LANES = numpy.arange(8, dtype=numpy.float32)


@borrowing
def _apart(near, first, padded, scale, x, w, place, lanes):  # type: ignore[no-untyped-def]
    """Return the distances of 8 points, whose first values are at ``first``, to the values of ``x`` from ``place``."""
    apart = scale * load(near, first) - spread(x[place])
    total = spread(w[place]) * apart * apart
    for i in range(1, len(lanes)):
        apart = scale * load(near, first + i * padded) - spread(x[place + i])
        total += spread(w[place + i]) * apart * apart
    return total


@borrowing
def first_of(best, found):  # type: ignore[no-untyped-def]
    """Return the least ``found`` of the lanes that have the least ``best``, and that."""
    value = least(best)
    return int(least(pick(spread(value), best, spread(_LARGEST), found))), value


@borrowing
def nearest(near, first, many, scale, x, w, place, lanes):  # type: ignore[no-untyped-def]
    """Return which of ``many`` points, from ``first`` in ``near`` on, is nearest to the values from ``place`` on.

    ``lanes`` is a tuple as long as a point has values, so that loops over them are unrolled.
    """
    scales, number, padded = spread(scale), load(LANES, 0), (many + 7) & -8
    best, found = spread(_LARGEST), number
    for point in range(first, first + many, 8):
        tried = _apart(near, point, padded, scales, x, w, place, lanes)
        found = pick(tried, best, number, found)
        best = lesser(tried, best)
        number += spread(_EIGHT)
    return first_of(best, found)[0]


@borrowing
def nearest_shifted(near, first, many, scale, shift, x, w, place, pulls, lanes):  # type: ignore[no-untyped-def]
    """Return the same of points of 8 values that are raised by ``shift``; ``pulls`` is scratch."""
    sure = _sure_of_shifted(near, first, many, scale, shift, x, w, place, pulls, lanes)
    if sure >= 0:
        return sure
    scales, shifts, number = spread(scale), spread(shift), load(LANES, 0)
    padded = (many + 7) & -8
    best, found = spread(_LARGEST), number
    for point in range(first, first + many, 8):
        apart = scales * (load(near, point) + shifts) - spread(x[place])
        tried = spread(w[place]) * apart * apart
        for i in range(1, len(lanes)):
            apart = scales * (load(near, point + i * padded) + shifts) - spread(x[place + i])
            tried += spread(w[place + i]) * apart * apart
        found = pick(tried, best, number, found)
        best = lesser(tried, best)
        number += spread(_EIGHT)
    return first_of(best, found)[0]


@borrowing
def _sure_of_shifted(near, first, many, scale, shift, x, w, place, pulls, lanes):  # type: ignore[no-untyped-def]
    """Return the nearest point where it is so by more than rounding, else -1."""
    scales, weights, target = spread(scale), load(w, place), load(x, place)
    moved = target - spread(scale * shift)
    store(pulls, 0, weights * (moved + moved))
    reach = scales + scales
    margin = total(weights * (target * target + reach * reach)) * MARGIN
    if not (SMALL < margin < HUGE and LEAST < scale < _ONE / LEAST):
        return -1
    number, padded = load(LANES, 0), (many + 7) & -8
    best, second, found = spread(_LARGEST), spread(_LARGEST), number
    for point in range(first, first + many, 8):
        square, pull = _sums(near, point, padded, pulls, 0, w, place, lanes)
        tried = scales * (scales * square - pull)
        found = pick(tried, best, number, found)
        second = lesser(greater(tried, best), second)
        best = lesser(tried, best)
        number += spread(_EIGHT)
    point, value = first_of(best, found)
    limit = spread(value + margin)
    bits = below(best, limit)
    alone = bits and not bits & (bits - 1) and not below(second, limit)
    return point if alone else -1


@borrowing
def _sums(near, first, padded, pulls, start, w, place, lanes):  # type: ignore[no-untyped-def]
    """Return two sums of 8 points, ``w q^2`` and ``pulls q``; both arrays are of values, from their places on."""
    square, product = spread(_ZERO), spread(_ZERO)
    for i in range(len(lanes)):
        q = load(near, first + i * padded)
        square = fused(spread(w[place + i]) * q, q, square)
        product = fused(spread(pulls[start + i]), q, product)
    return square, product


@borrowing
def measure(near, first, many, pulls, w, place, lanes, terms):  # type: ignore[no-untyped-def]
    """Fill in the sums of ``many`` points, 8 of one and 8 of the other by turns.

    With ``pulls`` of ``2 w x`` a point's distance at a scale is ``scale (scale w q^2 - pulls q)`` and what all share.
    """
    padded = (many + 7) & -8
    for point in range(0, many, 8):
        square, product = _sums(near, first + point, padded, pulls, place, w, place, lanes)
        store(terms, 2 * point, square)
        store(terms, 2 * point + 8, product)


@borrowing
def surely_nearest(terms, many, scale, margin):  # type: ignore[no-untyped-def]
    """Return which of up to 64 points of `measure` is nearer than all others by ``margin``, or -1."""
    scales, low = spread(scale), spread(_LARGEST)
    for point in range(0, 2 * many, 16):
        low = lesser(scales * (scales * load(terms, point) - load(terms, point + 8)), low)
    limit, bits = spread(least(low) + margin), numpy.int64(0)
    for point in range(0, 2 * many, 16):
        tried = scales * (scales * load(terms, point) - load(terms, point + 8))
        bits |= below(tried, limit) << (point >> 1)
    bits &= (numpy.int64(2) << (many - 1)) - 1  # padding is the last point again
    return first_bit(bits) if bits and not bits & (bits - 1) else -1
