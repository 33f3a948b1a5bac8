"""ggml's search for IQ1_S and IQ1_M, to the last bit, in loops that numba compiles.

The digits of a point are -1, 0 and 1, all raised or lowered by an eighth (the shift). Sort the weights of a group: any
rounding cuts them into a run of -1, a run of 0 and a run of 1. ggml tries all pairs of cuts with all choices of shifts
and takes the one with the greatest ``product^2 / square``, where ``product = sum w x q`` and ``square = sum w q^2``.
Then the digits of each 8 weights become the nearest point, and the scale is fitted again. As in `magnitude_loops`, sums
go in ggml's order, and of equal candidates the first is taken.

*Cuts.* With prefix sums ``X`` of ``w x`` and ``W`` of ``w``, the sums of the cuts ``(i1, i2)`` with choice ``k`` of
shifts are ``p_k - X[i1] - X[i2]`` and ``q_k + C_k[i1] - E_k[i2]``, so that 8 candidates are a few instructions. These
sums are not in ggml's order: they only tell which candidates can be the best, those within `REACH` of the greatest.
Rounding moves a value by less than half of that, even where each candidate ties with the next one. Only these are tried
as ggml tries them. Where sums are so small or large that they could leave the range of float32, all are tried.

*Points.* Distances by sums decide where one point is nearer than all others by more than rounding; else the distances
are computed in ggml's order.

Points lie as `quantforge.packers.lattices.points.NeighborLists` says: ``tables`` is one of these. Read `search` first.
"""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import (
    LANE_NUMBERS,
    LARGEST,
    below,
    borrowing,
    fill,
    first_bit,
    first_of,
    greater,
    jit,
    lane_max,
    lane_sum,
    lesser,
    load,
    pick,
    spread,
    store,
)
from quantforge.packers.lattices.magnitude_loops import (
    HUGE,
    LEAST,
    MARGIN,
    SMALL,
    nearest_level,
    point_sums,
)

# The least magnitude of a group that is not empty, and the factor of the unit.
LIMITS = {"iq1_s": (1e-12, 1.125), "iq1_m": (1e-7, 1.1125)}
REACH = numpy.float32(1e-3)  # for 32 values, of 16 it is half
_ZERO, _ONE, _TWO = numpy.float32(0), numpy.float32(1), numpy.float32(2)
_EIGHT, _EIGHTH = numpy.float32(8), numpy.float32(0.125)
_VALUES = (0,) * 8  # as long as a point has values, so that loops over them are unrolled
# Of the first half and of the second, by choice.
_SHIFTS_OF_TWO = _EIGHTH * numpy.array([*[1, -1] * 4, *[1, -1] * 4], numpy.float32)
_SHIFTS_OF_FOUR = _EIGHTH * numpy.array([*[1, 1, -1, -1] * 2, *[1, -1, 1, -1] * 2], numpy.float32)
_LEAST_SUM, _GREATEST_SUM = numpy.float32(1e-14), numpy.float32(1e14)


@jit
def search(x, w, size, rough, least, fudge, tables, points, codes, lowered, levels, units):  # type: ignore[no-untyped-def]
    """Choose points, shifts and scales of blocks.

    Args:
        x, w: values and their weights, float32 ``[blocks, 256]``.
        size: of a group: 32 with one shift, 16 with one for each 8.
        rough: leave scales as they are before points are chosen, and points and units unfitted.
        least: a group whose largest magnitude is below it is empty.
        fudge: what the unit is multiplied by.
        tables: `Neighbours`.
        points: float32 ``[points, 8]``.
        codes: int32 ``[blocks, 32]``, filled in, as are ``lowered``, bool of the same shape, ``levels`` uint8
            ``[blocks, groups]`` and ``units`` float32 ``[blocks]``.
    """
    sums = (numpy.empty(size + 1, numpy.float32), numpy.empty(size + 1, numpy.float32))
    rise, under = numpy.empty((2, 4 * size + 16), numpy.float32)
    over, rows = numpy.empty((2, 8 * size + 8), numpy.float32)
    order, digits = numpy.empty(size, numpy.int64), numpy.empty(size, numpy.int64)
    ranks = numpy.empty(size, numpy.float32)
    terms = numpy.empty(16, numpy.float32)
    scratch = (order, digits, ranks, (sums, rise, under, over, rows), terms)
    scales = numpy.empty(256 // size, numpy.float32)
    _quantize_blocks(
        x,
        w,
        size,
        rough,
        least,
        fudge,
        tables,
        points,
        codes,
        lowered,
        levels,
        units,
        scales,
        scratch,
    )


@borrowing
def _quantize_blocks(  # type: ignore[no-untyped-def]
    x, w, size, rough, least, fudge, tables, points, codes, lowered, levels, units, scales, scratch
):
    groups, parts, terms = 256 // size, size // 8, scratch[4]
    for block in range(len(x)):
        largest = _ZERO
        for group in range(groups):
            run = slice(group * size, (group + 1) * size)
            part = slice(group * parts, (group + 1) * parts)
            scales[group] = _quantize_group(
                x[block, run],
                w[block, run],
                rough,
                least,
                tables,
                points,
                lowered[block, part],
                codes[block, part],
                scratch,
            )
            largest = max(largest, scales[group])
        fill(levels[block], 0)
        units[block] = _ZERO
        if largest == _ZERO:
            fill(codes[block], 0)
            fill(lowered[block], False)
            continue
        unit = largest / numpy.float32(15)
        inverse = _ONE / unit
        for group in range(groups):
            levels[block, group] = nearest_level(inverse * scales[group], 7)
        if size == 16 and not rough:
            unit = _fit_unit(
                x[block], w[block], codes[block], lowered[block], levels[block], unit, points, terms
            )
        units[block] = unit * fudge


@borrowing
def _quantize_group(xs, ws, rough, least, tables, points, mine, places, scratch):  # type: ignore[no-untyped-def]
    """Fill in points and shifts of one group and return its scale."""
    size = len(xs)
    order, digits, ranks, ways, terms = scratch
    fill(mine, False)
    fill(places, 0)
    if _largest_magnitude(xs) < least:
        return _ZERO
    sort_order(xs, order, ranks)
    if size == 32:
        scale, first, second, choice = find_cuts(xs, ws, order, 2, ways)
        fill(mine, choice == 1)
    else:
        scale, first, second, choice = find_cuts(xs, ws, order, 4, ways)
        mine[0], mine[1] = choice >> 1 & 1, choice & 1
    if first < 0:
        fill(mine, False)
        return _ZERO
    for j in range(size):
        digit = 0 if j < first else 1 if j < second else 2
        digits[order[j]] = digit if scale >= _ZERO else 2 - digit
    if scale < _ZERO:
        scale = -scale
        for part in range(len(mine)):
            mine[part] = not mine[part]
    return (
        scale
        if rough
        else _snap_to_points(xs, ws, scale, digits, mine, tables, points, places, terms)
    )


@borrowing
def _largest_magnitude(x):  # type: ignore[no-untyped-def]
    largest = _ZERO
    for i in range(len(x)):
        largest = max(largest, abs(x[i]))
    return largest


@borrowing
def _snap_to_points(x, w, scale, digits, lowered, tables, points, places, terms):  # type: ignore[no-untyped-def]
    """Fill in the points nearest to ``digits``, and return the scale that fits them; ``lowered``: of each point."""
    place, start, count, near, index = tables[0], tables[1], tables[2], tables[3], tables[4]
    missed = False
    for part in range(len(x) // 8):
        key, power = 0, 1
        for i in range(8):
            key += power * digits[8 * part + i]
            power *= 3
        places[part] = place[key]
        if places[part] < 0:
            missed = True
            shift = -_EIGHTH if lowered[part] else _EIGHTH
            run, many = start[key], count[key]
            found = _nearest_point(near, run * 8, many, scale, shift, x, w, 8 * part, terms)
            places[part] = index[run + found]
    if not missed:
        return scale
    top, bottom = _ZERO, _ZERO
    for part in range(len(x) // 8):
        value = load(points, 8 * places[part]) + spread(-_EIGHTH if lowered[part] else _EIGHTH)
        top, bottom = _add_eight(x, w, 8 * part, value, terms, top, bottom)
    return top / bottom if top > _ZERO and bottom > _ZERO else scale


@borrowing
def _fit_unit(x, w, codes, lowered, levels, unit, points, terms):  # type: ignore[no-untyped-def]
    """Return the unit that fits a block whose points and levels are chosen."""
    top, bottom = _ZERO, _ZERO
    for part in range(32):
        many = spread(numpy.float32(2 * numpy.int32(levels[part // 2]) + 1))
        shift = spread(-_EIGHTH if lowered[part] else _EIGHTH)
        value = (load(points, 8 * codes[part]) + shift) * many
        top, bottom = _add_eight(x, w, 8 * part, value, terms, top, bottom)
    return top / bottom if bottom > _ZERO else unit


@borrowing
def _add_eight(x, w, first, value, terms, top, bottom):  # type: ignore[no-untyped-def]
    """Return the two sums of the best scale with 8 values added, one after the other; ``terms`` is scratch."""
    weighted = load(w, first) * value
    store(terms, 0, weighted * load(x, first))
    store(terms, 8, weighted * value)
    for i in range(8):
        top += terms[i]
        bottom += terms[8 + i]
    return top, bottom


# Cuts of a sorted group


@borrowing
def find_cuts(x, w, order, ways, scratch):  # type: ignore[no-untyped-def]
    """Return scale, first and second cut and choice of shifts of the best candidate; cuts of -1 if there is none.

    ``ways``, the number of choices, is 2 for one shift (choice 1: lowered), 4 for two halves with a shift each (two
    bits, the first half in the upper one).
    """
    size = len(x)
    sums, rise, under, over, rows = scratch
    in_range = _prepare_sums(x, w, order, ways, sums, rise, under, over)
    stop, top = (size + 1) * ways, spread(_ZERO)
    for i1 in range(size + 1):
        moved, raised = spread(sums[0][i1]), load(over, i1 * 8)
        row = spread(_ZERO)
        for place in range(i1 * ways, stop, 8):
            row = greater(_quality(rise, under, place, moved, raised), row)
        store(rows, i1 * 8, row)
        top = greater(row, top)
    limit = lane_max(top) * (_ONE - REACH * numpy.float32(size) / numpy.float32(32))
    limits = spread(limit if in_range else -LARGEST)
    best, scale, first, second, choice = -LARGEST, _ZERO, -1, -1, -1
    for i1 in range(size + 1):
        if in_range and not below(limits, load(rows, i1 * 8)):
            continue
        moved, raised = spread(sums[0][i1]), load(over, i1 * 8)
        for start in range(i1 * ways, stop, 8):
            bits = numpy.int64(255)
            if in_range:
                bits = below(limits, _quality(rise, under, start, moved, raised))
            while bits:
                place = start + first_bit(bits)
                bits &= bits - 1
                if place >= stop:
                    break
                i2, k = place // ways, place % ways
                if ways == 2:
                    product, square = _sums_of_group(sums, i1, i2, k)
                else:
                    product, square = _sums_of_halves(x, w, order, i1, i2, k)
                if square > _ZERO and product * product > best * square:
                    scale = product / square
                    best = scale * product
                    first, second, choice = i1, i2, k
    return scale, first, second, choice


@borrowing
def sort_order(x, order, ranks):  # type: ignore[no-untyped-def]
    """Fill ``order`` with the places of ``x`` by rising value; equal values keep their order."""
    size, one, zero = len(x), spread(_ONE), spread(_ZERO)
    for first in range(0, size, 8):
        mine, rank = load(x, first), zero
        for j in range(size):
            rank += pick(spread(x[j]), mine, one, zero)
        store(ranks, first, rank)
    fill(order, -1)
    for i in range(size):
        place = int(ranks[i])
        while order[place] >= 0:  # an equal value before it
            place += 1
        order[place] = i


@borrowing
def _prepare_sums(x, w, order, ways, sums, rise, under, over):  # type: ignore[no-untyped-def]
    """Fill in the terms of the two sums of all candidates, and the prefix sums; return whether these are in range.

    Lanes are choices, repeated; those after the last cut repeat it.
    """
    size, half = len(x), len(x) // 2
    sumx, sumw = sums
    allx, allw, highx, highw, large = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
    sumx[0], sumw[0] = _ZERO, _ZERO
    for j in range(size):
        i = order[j]
        part = w[i] * x[i]
        allx += part
        allw += w[i]
        sumx[j + 1], sumw[j + 1] = allx, allw
        large += abs(part)
        if i >= half:
            highx += part
            highw += w[i]
    one, two = spread(_ONE), spread(_TWO)
    shifts = _SHIFTS_OF_TWO if ways == 2 else _SHIFTS_OF_FOUR
    low, high = load(shifts, 0), load(shifts, 8)
    p = spread(allx) + low * spread(allx - highx) + high * spread(highx)
    low_square, high_square = (one + low) * (one + low), (one + high) * (one + high)
    q = low_square * spread(allw - highw) + high_square * spread(highw)
    low, high, moved = two * low, two * high, spread(_ZERO)
    for j in range(size + 1):
        mine = spread(sumw[j])
        store(rise, j * ways, p - spread(sumx[j]))
        store(under, j * ways, q - (mine + moved))
        store(over, j * 8, mine - moved)
        if j < size:
            i = order[j]
            moved += (low if i < half else high) * spread(w[i])
    return min(large, allw) > _LEAST_SUM and max(large, allw) < _GREATEST_SUM


@borrowing
def _quality(rise, under, place, moved, raised):  # type: ignore[no-untyped-def]
    product = load(rise, place) - moved
    return product * product / (load(under, place) + raised)


@borrowing
def _sums_of_group(sums, first, second, k):  # type: ignore[no-untyped-def]
    """Return ggml's sums of two cuts of a whole group with one shift."""
    sumx, sumw = sums
    size = len(sumx) - 1
    delta = -_EIGHTH if k else _EIGHTH
    v0, v1, v2 = delta - _ONE, delta, delta + _ONE
    lowx, loww = sumx[first] - sumx[0], sumw[first] - sumw[0]
    midx, midw = sumx[second] - sumx[first], sumw[second] - sumw[first]
    highx, highw = sumx[size] - sumx[second], sumw[size] - sumw[second]
    product = lowx * v0 + midx * v1 + highx * v2
    return product, loww * v0 * v0 + midw * v1 * v1 + highw * v2 * v2


@borrowing
def _sums_of_halves(x, w, order, first, second, k):  # type: ignore[no-untyped-def]
    """Return ggml's sums of two cuts of two halves with a shift each."""
    product, square, half = _ZERO, _ZERO, len(x) // 2
    for j in range(len(x)):
        i = order[j]
        lowered = k >> 1 if i < half else k & 1
        digit = _ONE if j >= second else _ZERO if j >= first else -_ONE
        value = digit + (-_EIGHTH if lowered else _EIGHTH)
        product += w[i] * value * x[i]
        square += w[i] * value * value
    return product, square


# The nearest of a few shifted points: 8 side by side, each in the order of its values; the first of equal ones


@borrowing
def _nearest_point(near, first, many, scale, shift, x, w, place, pulls):  # type: ignore[no-untyped-def]
    """Return which of ``many`` points, raised by ``shift``, is nearest to the 8 values from ``place`` on.

    Points begin at ``first`` in ``near``; ``pulls`` is scratch.
    """
    sure = _surely_nearest(near, first, many, scale, shift, x, w, place, pulls)
    if sure >= 0:
        return sure
    scales, shifts, number = spread(scale), spread(shift), load(LANE_NUMBERS, 0)
    padded = (many + 7) & -8
    best, found = spread(LARGEST), number
    for point in range(first, first + many, 8):
        apart = scales * (load(near, point) + shifts) - spread(x[place])
        tried = spread(w[place]) * apart * apart
        for i in range(1, 8):
            apart = scales * (load(near, point + i * padded) + shifts) - spread(x[place + i])
            tried += spread(w[place + i]) * apart * apart
        found = pick(tried, best, number, found)
        best = lesser(tried, best)
        number += spread(_EIGHT)
    return first_of(best, found)[0]


@borrowing
def _surely_nearest(near, first, many, scale, shift, x, w, place, pulls):  # type: ignore[no-untyped-def]
    """Return the nearest point where it is nearer than all others by more than rounding, else -1."""
    scales, weights, target = spread(scale), load(w, place), load(x, place)
    moved = target - spread(scale * shift)
    store(pulls, 0, weights * (moved + moved))
    reach = scales + scales
    margin = lane_sum(weights * (target * target + reach * reach)) * MARGIN
    if not (SMALL < margin < HUGE and LEAST < scale < _ONE / LEAST):
        return -1
    number, padded = load(LANE_NUMBERS, 0), (many + 7) & -8
    best, second, found = spread(LARGEST), spread(LARGEST), number
    for point in range(first, first + many, 8):
        square, pull = point_sums(near, point, padded, pulls, 0, w, place, _VALUES)
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
