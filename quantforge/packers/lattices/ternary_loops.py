"""ggml's searches for IQ1_S and IQ1_M, restated in loops that numba compiles; for its bytes see `reference_loops`.

With three values a group that is sorted falls into three runs, so that all ways to cut it are tried, with either shift.
"""

from __future__ import annotations

import numpy

from quantforge.packers.ggml.panel_loops import inner, jit
from quantforge.packers.lattices.reference_loops import level, nearest_of_eight

_ZERO, _ONE, _EIGHTH = numpy.float32(0), numpy.float32(1), numpy.float32(0.125)
_LOWEST = numpy.float32(-3.4028234663852886e38)


@inner
def _sorted(x, order):  # type: ignore[no-untyped-def]
    """Fill ``order`` with the places of ``x`` by rising value; equal ones keep their order."""
    for i in range(len(x)):
        value, place = x[i], i
        while place > 0 and x[order[place - 1]] > value:
            order[place] = order[place - 1]
            place -= 1
        order[place] = i


@inner
def _largest(x):  # type: ignore[no-untyped-def]
    most = _ZERO
    for i in range(len(x)):
        most = max(most, abs(x[i]))
    return most


@inner
def _cut_with_one_shift(x, w, order, sums, tops, bottoms):  # type: ignore[no-untyped-def]
    """Return scale, first and second cut and shift of the best way; no way: cuts of -1."""
    size = len(x)
    sumx, sumw = sums
    sumx[0], sumw[0] = _ZERO, _ZERO
    for j in range(size):
        i = order[j]
        sumx[j + 1] = sumx[j] + w[i] * x[i]
        sumw[j + 1] = sumw[j] + w[i]
    best, scale, first, second, shift = _LOWEST, _ZERO, -1, -1, 0
    allx, allw = sumx[size], sumw[size]
    for i1 in range(size + 1):
        lowx, loww = sumx[i1] - sumx[0], sumw[i1] - sumw[0]
        for sign in range(2):
            delta = _EIGHTH if sign == 0 else -_EIGHTH
            v0, v1, v2 = delta - _ONE, delta, delta + _ONE
            for i2 in range(i1, size + 1):
                tops[sign, i2] = lowx * v0 + (sumx[i2] - sumx[i1]) * v1 + (allx - sumx[i2]) * v2
                bottoms[sign, i2] = (
                    loww * v0 * v0 + (sumw[i2] - sumw[i1]) * v1 * v1 + (allw - sumw[i2]) * v2 * v2
                )
        for i2 in range(i1, size + 1):
            for sign in range(2):
                top, bottom = tops[sign, i2], bottoms[sign, i2]
                if bottom > _ZERO and top * top > best * bottom:
                    scale = top / bottom
                    best = scale * top
                    first, second, shift = i1, i2, 1 - 2 * sign
    return scale, first, second, shift


@inner
def _cut_with_two_shifts(x, w, order, terms, tops, bottoms):  # type: ignore[no-untyped-def]
    """Return the same of two halves with a shift each: the fourth number is 2 bits, 1 where a half is lowered."""
    size = len(x)
    up, down, halves = terms  # [level, sign of the shift of the element's half, element in order]
    for j in range(size):
        i = order[j]
        for k in range(4):
            halves[k, j] = k >> 1 if i < size // 2 else k & 1
        for sign in range(2):
            delta = _EIGHTH if sign == 0 else -_EIGHTH
            for digit in range(3):
                value = numpy.float32(digit - 1) + delta
                up[digit, sign, j] = w[i] * value * x[i]
                down[digit, sign, j] = w[i] * value * value
    best, scale, first, second, shifts = _LOWEST, _ZERO, -1, -1, -1
    for i1 in range(size + 1):
        for k in range(4):
            top, bottom = _ZERO, _ZERO
            for j in range(i1):
                top += up[0, halves[k, j], j]
                bottom += down[0, halves[k, j], j]
            mine, under = tops[k], bottoms[k]
            for i2 in range(size + 1):
                mine[i2], under[i2] = top, bottom
            for j in range(i1, size):
                half = halves[k, j]
                a, b = up[1, half, j], up[2, half, j]
                c, d = down[1, half, j], down[2, half, j]
                for i2 in range(j + 1):
                    mine[i2] += b
                    under[i2] += d
                for i2 in range(j + 1, size + 1):
                    mine[i2] += a
                    under[i2] += c
        for i2 in range(i1, size + 1):
            for k in range(4):
                top, bottom = tops[k, i2], bottoms[k, i2]
                if bottom > _ZERO and top * top > best * bottom:
                    scale = top / bottom
                    best = scale * top
                    first, second, shifts = i1, i2, k
    return scale, first, second, shifts


@inner
def _snap(x, w, scale, digits, lowered, tables, places, distance):  # type: ignore[no-untyped-def]
    """Fill in the points nearest to ``digits``, and return the scale that fits them; ``lowered``: of each point."""
    place, start, count, near, index, table = tables
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
            found = nearest_of_eight(near, run * 8, many, scale, shift, x, w, 8 * part, distance)
            places[part] = index[run + found]
    if not missed:
        return scale
    top, bottom = _ZERO, _ZERO
    for part in range(len(x) // 8):
        shift = -_EIGHTH if lowered[part] else _EIGHTH
        for i in range(8):
            q = numpy.float32(numpy.int32(table[places[part], i]) - 1) + shift
            weight = w[8 * part + i]
            top += weight * q * x[8 * part + i]
            bottom += weight * q * q
    return top / bottom if top > _ZERO and bottom > _ZERO else scale


@inner
def _chosen(xs, ws, least, tables, mine, places, scratch):  # type: ignore[no-untyped-def]
    """Fill in points and shifts of one group and return its scale."""
    size = len(xs)
    order, digits, sums, terms, tops, bottoms, distance = scratch
    mine[:], places[:] = False, 0
    if _largest(xs) < least:
        return _ZERO
    _sorted(xs, order)
    if size == 32:
        found = _cut_with_one_shift(xs, ws, order, sums, tops, bottoms)
        mine[:] = found[3] < 0
    else:
        found = _cut_with_two_shifts(xs, ws, order, terms, tops, bottoms)
        mine[0], mine[1] = found[3] >> 1 & 1, found[3] & 1
    scale, first, second, _ = found
    if first < 0:
        mine[:] = False
        return _ZERO
    for j in range(size):
        digit = 0 if j < first else 1 if j < second else 2
        digits[order[j]] = digit if scale >= _ZERO else 2 - digit
    if scale < _ZERO:
        scale = -scale
        for part in range(len(mine)):
            mine[part] = not mine[part]
    return _snap(xs, ws, scale, digits, mine, tables, places, distance)


@jit
def search(x, w, size, least, fudge, tables, codes, lowered, levels, units):  # type: ignore[no-untyped-def]
    """Choose points, shifts and scales of blocks.

    Args:
        x, w: values and their weights, float32 ``[blocks, 256]``.
        size: of a group: 32 with one shift, 16 with one for each 8.
        least: a group whose largest magnitude is below it is empty.
        fudge: what the unit is multiplied with.
        tables: of `neighbours`.
        codes: int32 ``[blocks, 32]``, filled in, as are ``lowered``, bool of the same shape, ``levels`` uint8
            ``[blocks, groups]`` and ``units`` float32 ``[blocks]``.
    """
    groups, parts = 256 // size, size // 8
    sums = (numpy.empty(size + 1, numpy.float32), numpy.empty(size + 1, numpy.float32))
    up, down = numpy.empty((3, 2, size), numpy.float32), numpy.empty((3, 2, size), numpy.float32)
    tops, bottoms = numpy.empty((2, 4, size + 1), numpy.float32)
    terms = (up, down, numpy.empty((4, size), numpy.int64))
    order, digits = numpy.empty(size, numpy.int64), numpy.empty(size, numpy.int64)
    distance = numpy.empty(len(tables[5]) + 8, numpy.float32)
    scratch = (order, digits, sums, terms, tops, bottoms, distance)
    scales = numpy.empty(groups, numpy.float32)
    for block in range(len(x)):
        most = _ZERO
        for group in range(groups):
            run = slice(group * size, (group + 1) * size)
            part = slice(group * parts, (group + 1) * parts)
            scales[group] = _chosen(
                x[block, run],
                w[block, run],
                least,
                tables,
                lowered[block, part],
                codes[block, part],
                scratch,
            )
            most = max(most, scales[group])
        levels[block], units[block] = 0, _ZERO
        if most == _ZERO:
            codes[block], lowered[block] = 0, False
            continue
        unit = most / numpy.float32(15)
        inverse = _ONE / unit
        for group in range(groups):
            levels[block, group] = level(inverse * scales[group], 7)
        if size == 16:
            unit = _fitted(
                x[block], w[block], codes[block], lowered[block], levels[block], unit, tables[5]
            )
        units[block] = unit * fudge


@inner
def _fitted(x, w, codes, lowered, levels, unit, table):  # type: ignore[no-untyped-def]
    """Return the unit that fits a block whose points and levels are chosen."""
    top, bottom = _ZERO, _ZERO
    for part in range(32):
        many = numpy.float32(2 * numpy.int32(levels[part // 2]) + 1)
        shift = -_EIGHTH if lowered[part] else _EIGHTH
        for i in range(8):
            q = (numpy.float32(numpy.int32(table[codes[part], i]) - 1) + shift) * many
            weight = w[8 * part + i]
            top += weight * q * x[8 * part + i]
            bottom += weight * q * q
    return top / bottom if bottom > _ZERO else unit
