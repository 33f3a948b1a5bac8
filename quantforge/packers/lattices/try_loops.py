"""Which of many scales ggml takes for a group, for the lattice types of 2 and 3 bits, to the last bit.

ggml rounds a group with each of 13 to 31 scales to points and takes the scale with the greatest ``product^2 / square``.
From one scale to the next few digits change, so here each part of a group has runs of scales that share a key. Between
two points the sign of the difference of their distances is that of a linear function of the scale: a point that is
nearest at both ends of a run, by more than rounding, is so within. The sums are first taken part by part, which tells
the scales that can be the best: those within `REACH` of the greatest. Rounding moves a value by less than half of it,
also where each of them ties with the next one. These alone are tried as ggml tries them.
"""

from __future__ import annotations

import numpy

from quantforge.packers.ggml.panel_loops import borrowing
from quantforge.packers.lattices.eights import (
    differing,
    first_bit,
    greater,
    last_bit,
    lesser,
    load,
    spread,
    store,
    total,
)
from quantforge.packers.lattices.near_loops import (
    HUGE,
    LEAST,
    MARGIN,
    SMALL,
    measure,
    nearest,
    surely_nearest,
)

STRIDE = 48  # of the keys of a part: 8 before them
REACH = 2e-5
_MAGIC = numpy.float32(12582912.0)
_ZERO, _HALF, _ONE = numpy.float32(0), numpy.float32(0.5), numpy.float32(1)
_TINY, _HUGE = numpy.float32(1e-14), numpy.float32(1e14)


@borrowing
def _keys(values, size, lanes, base, inverses, count, keys):  # type: ignore[no-untyped-def]
    """Fill in the keys of all parts for all scales."""
    one, half, magic, zero = spread(_ONE), spread(_HALF), spread(_MAGIC), spread(_ZERO)
    width = len(lanes)
    top = spread(numpy.float32(base - 1))
    for part in range(size // width):
        for first in range(0, count, 8):
            inverse, key, power = load(inverses, first), zero, one
            for i in range(part * width, part * width + width):
                digit = half * (inverse * spread(values[i]) - one)
                digit = lesser(greater((digit + magic) - magic, zero), top)
                key += power * digit
                power = power * spread(numpy.float32(base))
            store(keys, part * STRIDE + 8 + first, key)


@borrowing
def _changes(keys, part, count):  # type: ignore[no-untyped-def]
    """Return bits: set where the key of a part is another than for the scale before, and for the first scale."""
    bits = numpy.int64(1)
    for first in range(0, count, 8):
        place = part * STRIDE + 8 + first
        bits |= differing(load(keys, place), load(keys, place - 1)) << first
    return (bits | 1) & ((numpy.int64(1) << count) - 1)


@borrowing
def _note(runs, part, start, stop, point, on_grid, sums, wx, w, odd, lanes):  # type: ignore[no-untyped-def]
    """Write down a run of scales with one point, and add its sums where it begins, to be taken away where it ends."""
    marks, points, known = runs
    first, product, square = part * len(lanes), _ZERO, _ZERO
    marks[part] |= numpy.int64(1) << start
    points[part, start], known[part, start] = point, on_grid
    if len(lanes) == 8:
        value = load(odd, 8 * point)
        product = total(load(wx, first) * value)
        square = total(load(w, first) * value * value)
    else:
        for i in range(len(lanes)):
            q = odd[point, i]
            product += wx[first + i] * q
            square += w[first + i] * q * q
    sums[start, 0] += product
    sums[start, 1] += square
    sums[stop, 0] -= product
    sums[stop, 1] -= square


@borrowing
def _missed(  # type: ignore[no-untyped-def]
    run, length, start, last, part, margin, x, roots, form, tables, odd, scratch, runs, sums, wx, w
):
    """Note the points of a run of scales whose key is no point."""
    near, index = tables[3], tables[4]
    _, scales, _, pulls, terms = scratch
    lanes = form[1]
    first, row = part * len(lanes), run * len(lanes)
    sure = length <= 64 and SMALL < margin < HUGE
    sure &= scales[-1] > LEAST and scales[0] < _ONE / LEAST
    if sure:
        measure(near, row, length, pulls, roots, first, lanes, terms)
    while start <= last:
        high, found = start, -1
        if sure:
            found = surely_nearest(terms, length, scales[start], margin)
        if found < 0:
            found = nearest(near, row, length, scales[start], x, roots, first, lanes)
        else:
            high = last
            while high > start and surely_nearest(terms, length, scales[high], margin) != found:
                high = (start + high) >> 1
        _note(runs, part, start, high + 1, index[run + found], False, sums, wx, w, odd, lanes)
        start = high + 1


@borrowing
def runs_of(values, w, roots, wx, form, count, tables, odd, scratch, runs, sums):  # type: ignore[no-untyped-def]
    """Fill in the runs of all parts and where the sums change, and return bits: set for scales that begin a run."""
    size, lanes, base = form
    inverses, scales, keys, pulls, _ = scratch
    place, begin, many = tables[0], tables[1], tables[2]
    marks, width, begun = runs[0], len(lanes), numpy.int64(0)
    _keys(values, size, lanes, base, inverses, count, keys)
    for t in range(count + 1):
        sums[t, 0] = sums[t, 1] = 0.0
    high = scales[0] * numpy.float32(2 * base - 1)
    for first in range(0, size, 8):
        value = load(roots, first) * load(values, first)
        store(pulls, first, value + value)
    for part in range(size // width):
        first, bound = part * width, _ZERO
        for i in range(first, first + width):
            bound += roots[i] * (values[i] * values[i] + high * high)
        marks[part] = 0
        bits = _changes(keys, part, count)
        while bits:
            start = first_bit(bits)
            bits &= bits - 1
            last = (first_bit(bits) if bits else count) - 1
            key = int(keys[part * STRIDE + 8 + start])
            point = place[key]
            if point >= 0:
                _note(runs, part, start, last + 1, point, True, sums, wx, w, odd, lanes)
            else:
                _missed(
                    begin[key], many[key], start, last, part, bound * MARGIN, values, roots, form,
                    tables, odd, scratch, runs, sums, wx, w,
                )  # fmt: skip
        begun |= marks[part]
    return begun


@borrowing
def limit_of(sums, begun, large):  # type: ignore[no-untyped-def]
    """Sum up, and return the least ``product^2 / square`` to be tried; ``large``: sum of the sizes of ``w x``."""
    best, under, product, square = 0.0, 1.0, 0.0, 0.0
    while begun:
        t = first_bit(begun)
        begun &= begun - 1
        product += sums[t, 0]
        square += sums[t, 1]
        sums[t, 0], sums[t, 1] = product, square
        squared = product * product
        if squared * under > best * square:
            best, under = squared, square
    in_range = min(large, under) > _TINY and max(large, under) < _HUGE
    clear = best > 0.25 * large * large
    return best / under * (1 - REACH) if in_range and clear else -1.0


@borrowing
def points_at(runs, parts, t, points, on_grid):  # type: ignore[no-untyped-def]
    """Fill in the points of all parts for scale ``t``, and which of them are on the grid."""
    marks, found, known = runs
    until = (numpy.int64(2) << t) - 1
    for part in range(parts):
        start = last_bit(marks[part] & until)
        points[part], on_grid[part] = found[part, start], known[part, start]
