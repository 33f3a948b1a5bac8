"""Loops of `nearest_points`, compiled by numba: all points of a table are measured against one vector after the other.

The score of a point ``q`` is ``q M q - 2 q M u``, its distance from ``u`` without what all have in common. With signs
``s`` and magnitudes ``g`` it is ``g (S M S) g - 2 g (S M u)``: the first part is the same for all rows, and is computed
once for every mask of signs that comes up. Tables lie coordinate by coordinate, so that 8 points are one vector
instruction; sums are in a fixed order, and the same on every processor.
"""

from __future__ import annotations

import numpy

from quantforge.packers.ggml.panel_loops import borrowing, inner, jit
from quantforge.packers.lattices.eights import lesser, load, pick, spread, store
from quantforge.packers.lattices.near_loops import first_of

FIRST = 4  # points of the first half that a second half is looked for, where two share their signs
_ZERO, _ONE, _TWO, _EIGHT = (numpy.float32(value) for value in (0, 1, 2, 8))
_LARGEST = numpy.float32(3.4028234663852886e38)
_LANES = numpy.arange(8, dtype=numpy.float32)


@borrowing
def _four(table, first, slopes, p):  # type: ignore[no-untyped-def]
    """Return what 4 coordinates from ``first`` on add to the scores of 8 points."""
    start, size = first * table.shape[1] + p, table.shape[1]
    summed = spread(slopes[first]) * load(table, start)
    for i in range(1, 4):
        summed += spread(slopes[first + i]) * load(table, start + i * size)
    return summed


@borrowing
def _score(table, base, slopes, p):  # type: ignore[no-untyped-def]
    """Return ``base + table slopes`` of 8 points, ``table`` ``[width, points]``."""
    if table.shape[0] == 8:
        return load(base, p) + (_four(table, 0, slopes, p) + _four(table, 4, slopes, p))
    return load(base, p) + _four(table, 0, slopes, p)


@borrowing
def _nearest(table, base, slopes):  # type: ignore[no-untyped-def]
    """Return the point with the least score, the first of equal ones, and that."""
    best, number = spread(_LARGEST), load(_LANES, 0)
    found = number
    for p in range(0, table.shape[1], 8):
        score = _score(table, base, slopes, p)
        found = pick(score, best, number, found)
        best = lesser(score, best)
        number += spread(_EIGHT)
    return first_of(best, found)


@borrowing
def _least(score):  # type: ignore[no-untyped-def]
    """Return the place of the least score, the first of equal ones."""
    best, number = spread(_LARGEST), load(_LANES, 0)
    found = number
    for p in range(0, len(score), 8):
        tried = load(score, p)
        found = pick(tried, best, number, found)
        best = lesser(tried, best)
        number += spread(_EIGHT)
    return first_of(best, found)[0]


@borrowing
def _quadratic(table, metric, first, mask, out):  # type: ignore[no-untyped-def]
    """Fill in ``g (S M S) g`` of all points, ``M`` the part of the metric from ``first`` on, ``S`` of ``mask``."""
    width, points = table.shape
    for p in range(points):
        out[p] = _ZERO
    for i in range(width):
        for j in range(i + 1):
            value = metric[first + i, first + j] * (_ONE if i == j else _TWO)
            value = -value if (mask >> i ^ mask >> j) & 1 else value
            for p in range(points):
                out[p] += value * (table[i, p] * table[j, p])


@borrowing
def _choices(u, metric, columns, even, masks, order):  # type: ignore[no-untyped-def]
    """Fill ``masks`` with choices of signs and return how many: those of ``u``, and with the cheapest ones turned."""
    mask, count = 0, 0
    for i in range(columns):
        if u[i] < _ZERO:
            mask, count = mask | 1 << i, count + 1
        cost, place = abs(u[i]) * metric[i, i], i
        while (
            place > 0
            and abs(u[order[place - 1]]) * metric[order[place - 1], order[place - 1]] > cost
        ):
            order[place] = order[place - 1]
            place -= 1
        order[place] = i
    a, b, c, d = 1 << order[0], 1 << order[1], 1 << order[2], 1 << order[3]
    if even and count % 2:
        masks[0], masks[1], masks[2], masks[3] = mask ^ a, mask ^ b, mask ^ c, mask ^ d
        return 4
    if even:
        masks[0], masks[1], masks[2], masks[3] = mask, mask ^ a ^ b, mask ^ a ^ c, mask ^ b ^ c
        return 4
    masks[0], masks[1], masks[2], masks[3], masks[4] = (
        mask,
        mask ^ a,
        mask ^ b,
        mask ^ c,
        mask ^ a ^ b,
    )
    return 5


@inner
def _pair(table, tables, metric, marginal, u, slopes, mask, score, index_bits):  # type: ignore[no-untyped-def]
    """Return score and places of two points: the first by the distance that the second cannot make up for."""
    width, (base, free, last) = table.shape[0], tables
    mine, later = numpy.empty(width, numpy.float32), numpy.empty(width, numpy.float32)
    for i in range(width):
        pull = _ZERO
        for j in range(width):
            pull -= _TWO * marginal[i, j] * u[j]
        mine[i] = -pull if mask >> i & 1 else pull
    first = numpy.empty(FIRST, numpy.int64)
    for p in range(0, table.shape[1], 8):
        store(score, p, _score(table, free, mine, p))
    for number in range(FIRST):
        first[number] = _least(score)
        score[first[number]] = _LARGEST
    best, found = _LARGEST, 0
    for number in range(FIRST):
        p = first[number]
        known = base[p]
        for i in range(width):
            known += slopes[i] * table[i, p]
            later[i] = slopes[width + i]
        for i in range(width):
            for j in range(width):
                crossed = _TWO * metric[width + i, j] * table[j, p]
                later[i] += -crossed if (mask >> (width + i) ^ mask >> j) & 1 else crossed
        q, rest = _nearest(table, last, later)
        if known + rest < best:
            best, found = known + rest, p | q << index_bits
    return best, found


@inner
def _best(u, metric, marginal, table, form, cache, scratch):  # type: ignore[no-untyped-def]
    """Return distance, place or places, and signs of the best of some choices for one vector."""
    width, many, index_bits, signed, even, _ = form
    base, free, last, known = cache
    pulls, slopes, masks, order, score = scratch
    columns, constant = width * many, _ZERO
    for i in range(columns):
        pulls[i] = _ZERO
        for j in range(columns):
            pulls[i] -= _TWO * metric[i, j] * u[j]
        constant -= pulls[i] * u[i] / _TWO
    best, found, taken = _LARGEST, 0, 0
    masks[0], count, half = 0, 1, (1 << width) - 1
    if signed:
        count = _choices(u, metric, columns, even, masks, order)
    for choice in range(count):
        mask = masks[choice]
        for i in range(columns):
            slopes[i] = -pulls[i] if mask >> i & 1 else pulls[i]
        low, high = (mask, mask) if many == 1 else (mask & half, mask >> width)
        for part in (low, high):
            if not known[part]:
                known[part] = True
                _quadratic(table, metric, 0, part, base[part])
                if many > 1:
                    _quadratic(table, marginal, 0, part, free[part])
                    _quadratic(table, metric, width, part, last[part])
        if many == 1:
            place, total = _nearest(table, base[mask], slopes)
        else:
            tables = (base[low], free[low], last[high])
            total, place = _pair(
                table, tables, metric, marginal, u, slopes, mask, score, index_bits
            )
        if total + constant < best:
            best, found, taken = total + constant, place, mask
    return best, found, taken


@jit
def whole(t, steps, shifts, points, form, eighth, metric, marginal, codes):  # type: ignore[no-untyped-def]
    """Fill in the codes of vectors ``t`` under ``metric``; see `nearest_points.nearest_metric`.

    ``marginal`` is the metric of the first half where the second is free (unused where a code has one point).
    """
    width, many, index_bits, signed, _, two = form
    columns, size = width * many, len(points)
    table = numpy.ascontiguousarray(points.T)
    masks_of = 1 << width if signed else 1
    base = numpy.empty((masks_of, size), numpy.float32)
    free, last = base, base
    if many > 1:
        free, last = numpy.empty_like(base), numpy.empty_like(base)
    cache = (base, free, last, numpy.zeros(masks_of, numpy.bool_))
    u, pulls, slopes = numpy.empty((3, columns), numpy.float32)
    score = numpy.empty(size, numpy.float32)
    masks, order = numpy.zeros(5, numpy.int64), numpy.empty(columns, numpy.int64)
    scratch = (pulls, slopes, masks, order, score)
    for v in range(len(t)):
        step, code, best = steps[v], 0, _LARGEST
        inverse = _ZERO if step == _ZERO else _ONE / step
        for turn in range(2 if two else 1):
            moved = shifts[v] if not two else eighth if turn == 0 else -eighth
            for i in range(columns):
                u[i] = t[v, i] * inverse - moved
            total, found, mask = _best(u, metric, marginal, table, form, cache, scratch)
            if total < best:
                best, code = total, found | (mask | turn) << (index_bits * many)
        codes[v] = code
