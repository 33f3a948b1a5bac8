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

from quantforge.packers.ggml.panel_loops import borrowing, fill
from quantforge.packers.lattices.eights import (
    differing,
    first_bit,
    greater,
    lesser,
    load,
    spread,
    store,
    total,
)
from quantforge.packers.lattices.near_loops import nearest, nearest_for_both

STRIDE = 48  # of the keys of a part: 8 before them
REACH = 2e-5
_MARGIN = numpy.float32(128 * 2.0**-24)  # of distances, by the greatest that they are made of
_MAGIC = numpy.float32(12582912.0)
_ZERO, _HALF, _ONE = numpy.float32(0), numpy.float32(0.5), numpy.float32(1)
_SMALL, _TINY, _HUGE = numpy.float32(1e-25), numpy.float32(1e-14), numpy.float32(1e14)


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
    many, starts, stops, points, known = runs
    number, first, product, square = many[part], part * len(lanes), _ZERO, _ZERO
    many[part] = number + 1
    starts[part, number], stops[part, number] = start, stop
    points[part, number], known[part, number] = point, on_grid
    if len(lanes) == 8:
        value = load(odd, 8 * point)
        product = total(load(wx, first) * value)
        square = total(load(w, first) * value * value)
    else:
        for i in range(len(lanes)):
            q = odd[point, i]
            product += wx[first + i] * q
            square += w[first + i] * q * q
    sums[0, start] += product
    sums[0, stop] -= product
    sums[1, start] += square
    sums[1, stop] -= square


@borrowing
def runs_of(values, w, roots, wx, form, count, tables, odd, scratch, runs, sums):  # type: ignore[no-untyped-def]
    """Fill in the runs of all parts and the sums of all scales, float64 ``[2, scales]``."""
    size, lanes, base = form
    inverses, scales, keys = scratch
    place, begin, many, near, index = tables[0], tables[1], tables[2], tables[3], tables[4]
    width = len(lanes)
    _keys(values, size, lanes, base, inverses, count, keys)
    fill(sums[0], 0.0)
    fill(sums[1], 0.0)
    high = scales[0] * numpy.float32(2 * base - 1)
    for part in range(size // width):
        first, bound = part * width, _ZERO
        for i in range(first, first + width):
            bound += roots[i] * (values[i] * values[i] + high * high)
        runs[0][part] = 0
        bits = _changes(keys, part, count)
        while bits:
            start = first_bit(bits)
            bits &= bits - 1
            last = (first_bit(bits) if bits else count) - 1
            key = int(keys[part * STRIDE + 8 + start])
            if place[key] >= 0:
                _note(runs, part, start, last + 1, place[key], True, sums, wx, w, odd, lanes)
                continue
            run, length = begin[key], many[key]
            while start < last:  # from both ends inwards, until both have one point
                one, other, alone = nearest_for_both(
                    near, run * width, length, scales[start], scales[last], values, roots, first,
                    lanes, bound * _MARGIN,
                )  # fmt: skip
                point = index[run + one]
                if one == other and (start + 1 == last or (alone and bound > _SMALL)):
                    _note(runs, part, start, last + 1, point, False, sums, wx, w, odd, lanes)
                    start = last + 1
                    break
                _note(runs, part, start, start + 1, point, False, sums, wx, w, odd, lanes)
                point = index[run + other]
                _note(runs, part, last, last + 1, point, False, sums, wx, w, odd, lanes)
                start, last = start + 1, last - 1
            if start == last:
                scale = scales[start]
                found = nearest(near, run * width, length, scale, values, roots, first, lanes)
                point = index[run + found]
                _note(runs, part, start, start + 1, point, False, sums, wx, w, odd, lanes)
    for t in range(1, count):
        sums[0, t] += sums[0, t - 1]
        sums[1, t] += sums[1, t - 1]


@borrowing
def limit_of(sums, count, large):  # type: ignore[no-untyped-def]
    """Return the least ``product^2 / square`` to be tried; ``large``: sum of the sizes of ``w x``."""
    best, under = 0.0, 1.0
    for t in range(count):
        squared = sums[0, t] * sums[0, t]
        if squared * under > best * sums[1, t]:
            best, under = squared, sums[1, t]
    in_range = min(large, under) > _TINY and max(large, under) < _HUGE
    clear = best > 0.25 * large * large
    return best / under * (1 - REACH) if in_range and clear else -1.0


@borrowing
def points_at(runs, parts, t, points, on_grid):  # type: ignore[no-untyped-def]
    """Fill in the points of all parts for scale ``t``, and which of them are on the grid; say if any is another."""
    many, starts, stops, found, known = runs
    changed = False
    for part in range(parts):
        number = many[part] - 1
        while not starts[part, number] <= t < stops[part, number]:
            number -= 1
        changed |= points[part] != found[part, number]
        points[part], on_grid[part] = found[part, number], known[part, number]
    return changed
