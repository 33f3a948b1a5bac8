"""ggml's searches for IQ1_S and IQ1_M, restated in loops that numba compiles; for its bytes see `reference_loops`.

With three values a group that is sorted falls into three runs, so that all ways to cut it are tried, with either shift.
"""

from __future__ import annotations

import numpy

from quantforge.packers.ggml.panel_loops import borrowing, fill, jit
from quantforge.packers.lattices.cut_loops import best_cuts, in_order
from quantforge.packers.lattices.eights import load, spread, store
from quantforge.packers.lattices.near_loops import nearest_shifted
from quantforge.packers.lattices.reference_loops import level

_ZERO, _ONE, _EIGHTH = numpy.float32(0), numpy.float32(1), numpy.float32(0.125)


@borrowing
def _largest(x):  # type: ignore[no-untyped-def]
    most = _ZERO
    for i in range(len(x)):
        most = max(most, abs(x[i]))
    return most


@borrowing
def _added(x, w, first, value, terms, top, bottom):  # type: ignore[no-untyped-def]
    """Return the two sums of the best scale with 8 values added, one after the other; ``terms`` is scratch."""
    weighted = load(w, first) * value
    store(terms, 0, weighted * load(x, first))
    store(terms, 8, weighted * value)
    for i in range(8):
        top += terms[i]
        bottom += terms[8 + i]
    return top, bottom


@borrowing
def _snap(x, w, scale, digits, lowered, tables, points, places, terms):  # type: ignore[no-untyped-def]
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
            found = nearest_shifted(
                near, run * 8, many, scale, shift, x, w, 8 * part, terms, (0,) * 8
            )
            places[part] = index[run + found]
    if not missed:
        return scale
    top, bottom = _ZERO, _ZERO
    for part in range(len(x) // 8):
        value = load(points, 8 * places[part]) + spread(-_EIGHTH if lowered[part] else _EIGHTH)
        top, bottom = _added(x, w, 8 * part, value, terms, top, bottom)
    return top / bottom if top > _ZERO and bottom > _ZERO else scale


@borrowing
def _chosen(xs, ws, rough, least, tables, points, mine, places, scratch):  # type: ignore[no-untyped-def]
    """Fill in points and shifts of one group and return its scale."""
    size = len(xs)
    order, digits, ranks, ways, terms = scratch
    fill(mine, False)
    fill(places, 0)
    if _largest(xs) < least:
        return _ZERO
    in_order(xs, order, ranks)
    if size == 32:
        scale, first, second, choice = best_cuts(xs, ws, order, 2, ways)
        fill(mine, choice == 1)
    else:
        scale, first, second, choice = best_cuts(xs, ws, order, 4, ways)
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
    return scale if rough else _snap(xs, ws, scale, digits, mine, tables, points, places, terms)


@borrowing
def _fitted(x, w, codes, lowered, levels, unit, points, terms):  # type: ignore[no-untyped-def]
    """Return the unit that fits a block whose points and levels are chosen."""
    top, bottom = _ZERO, _ZERO
    for part in range(32):
        many = spread(numpy.float32(2 * numpy.int32(levels[part // 2]) + 1))
        shift = spread(-_EIGHTH if lowered[part] else _EIGHTH)
        value = (load(points, 8 * codes[part]) + shift) * many
        top, bottom = _added(x, w, 8 * part, value, terms, top, bottom)
    return top / bottom if bottom > _ZERO else unit


@borrowing
def _blocks(  # type: ignore[no-untyped-def]
    x, w, size, rough, least, fudge, tables, points, codes, lowered, levels, units, scales, scratch
):
    groups, parts, terms = 256 // size, size // 8, scratch[4]
    for block in range(len(x)):
        most = _ZERO
        for group in range(groups):
            run = slice(group * size, (group + 1) * size)
            part = slice(group * parts, (group + 1) * parts)
            scales[group] = _chosen(
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
            most = max(most, scales[group])
        fill(levels[block], 0)
        units[block] = _ZERO
        if most == _ZERO:
            fill(codes[block], 0)
            fill(lowered[block], False)
            continue
        unit = most / numpy.float32(15)
        inverse = _ONE / unit
        for group in range(groups):
            levels[block, group] = level(inverse * scales[group], 7)
        if size == 16 and not rough:
            unit = _fitted(
                x[block], w[block], codes[block], lowered[block], levels[block], unit, points, terms
            )
        units[block] = unit * fudge


@jit
def search(x, w, size, rough, least, fudge, tables, points, codes, lowered, levels, units):  # type: ignore[no-untyped-def]
    """Choose points, shifts and scales of blocks.

    Args:
        x, w: values and their weights, float32 ``[blocks, 256]``.
        size: of a group: 32 with one shift, 16 with one for each 8.
        rough: leave scales as they are before points are chosen, and points and units unfitted.
        least: a group whose largest magnitude is below it is empty.
        fudge: what the unit is multiplied with.
        tables: of `neighbours`.
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
    _blocks(
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
