"""The nearest of a few points, to the last bit as ggml finds it: 8 side by side, each in the order of its values.

Points lie as in `neighbours`. Of equal distances the first point is taken.
"""

from __future__ import annotations

import numpy

from quantforge.packers.ggml.panel_loops import borrowing
from quantforge.packers.lattices.eights import below, greater, least, lesser, load, pick, spread

_LARGEST = numpy.float32(3.4028234663852886e38)
_EIGHT = numpy.float32(8)
LANES = numpy.arange(8, dtype=numpy.float32)


@borrowing
def _apart(near, first, many, scale, x, w, place, lanes):  # type: ignore[no-untyped-def]
    """Return the distances of 8 points, whose first values are at ``first``, to the values of ``x`` from ``place``."""
    apart = scale * load(near, first) - spread(x[place])
    total = spread(w[place]) * apart * apart
    for i in range(1, len(lanes)):
        apart = scale * load(near, first + i * many) - spread(x[place + i])
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
    scales, number = spread(scale), load(LANES, 0)
    best, found = spread(_LARGEST), number
    for point in range(first, first + many, 8):
        tried = _apart(near, point, many, scales, x, w, place, lanes)
        found = pick(tried, best, number, found)
        best = lesser(tried, best)
        number += spread(_EIGHT)
    return first_of(best, found)[0]


@borrowing
def nearest_shifted(near, first, many, scale, shift, x, w, place):  # type: ignore[no-untyped-def]
    """Return the same of points of 8 values that are raised by ``shift``."""
    scales, shifts, number = spread(scale), spread(shift), load(LANES, 0)
    best, found = spread(_LARGEST), number
    for point in range(first, first + many, 8):
        apart = scales * (load(near, point) + shifts) - spread(x[place])
        tried = spread(w[place]) * apart * apart
        for i in range(1, 8):
            apart = scales * (load(near, point + i * many) + shifts) - spread(x[place + i])
            tried += spread(w[place + i]) * apart * apart
        found = pick(tried, best, number, found)
        best = lesser(tried, best)
        number += spread(_EIGHT)
    return first_of(best, found)[0]


@borrowing
def nearest_for_both(near, first, many, scale, other, x, w, place, lanes, margin):  # type: ignore[no-untyped-def]
    """Return the nearest points for two scales, and if both are nearer than all others by ``margin``."""
    scales, others, number = spread(scale), spread(other), load(LANES, 0)
    best, second, found = spread(_LARGEST), spread(_LARGEST), number
    later, beyond, taken = best, second, number
    for point in range(first, first + many, 8):
        tried = _apart(near, point, many, scales, x, w, place, lanes)
        moved = _apart(near, point, many, others, x, w, place, lanes)
        found, taken = pick(tried, best, number, found), pick(moved, later, number, taken)
        second = lesser(second, greater(tried, best))
        beyond = lesser(beyond, greater(moved, later))
        best, later = lesser(tried, best), lesser(moved, later)
        number += spread(_EIGHT)
    one, value = first_of(best, found)
    two, least_later = first_of(later, taken)
    alone = _alone(best, second, value + margin) and _alone(later, beyond, least_later + margin)
    return one, two, alone


@borrowing
def _alone(best, second, limit):  # type: ignore[no-untyped-def]
    bits = below(best, spread(limit))
    return bits != 0 and not bits & (bits - 1) and not below(second, spread(limit))
