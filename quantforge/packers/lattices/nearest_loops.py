"""Nearest points of a lattice, and the scales that minimise their errors, in loops that numba compiles.

Two metrics, with the same answer for the same input on every processor, since sums have a fixed order:

- *Weighted squares* (`nearest_weighted`, `search_scales`). Each weight keeps its sign; where the number of negative
  signs has to be even, the cheapest one is turned. So only magnitudes are searched, 8 columns at a time: one point of 8
  values, or two of 4. The best digits of each value alone are a lower bound. If they are a point, it is the nearest;
  else the search goes by halves of a point's digits: `quantforge.packers.lattices.points.PointHalves`, ``tables`` here,
  has a row of sums for each half, and for a first half zeros where a second one completes a point, infinity elsewhere.
  First halves that cannot win even with the best second half are skipped, which are most.
- *A whole metric* ``M`` (`nearest_in_metric`, for error feedback). The score of a point ``q`` is ``q M q - 2 q M u``,
  its distance from ``u`` without what all points share. Turning a sign can pay, so a few choices of signs are tried,
  each with all points. With signs ``S`` and magnitudes ``g`` the score is ``g (S M S) g - 2 g (S M u)``: the first part
  is the same for all rows, and is computed once for each mask of signs that comes up. Tables lie coordinate by
  coordinate, so that 8 points are one vector instruction.

Of points whose errors differ by rounding alone either may be taken.
"""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import (
    LANE_NUMBERS,
    LARGEST,
    below,
    borrowing,
    column,
    copy,
    fill,
    first_bit,
    first_of,
    inner,
    jit,
    lane_min,
    lane_sum,
    lesser,
    load,
    pick,
    spread,
    store,
)
from quantforge.packers.lattices.magnitude_loops import split_signs

FIRST = (
    4  # points of the first half that a second half is searched for, where two points share a code
)
_ZERO, _ONE, _TWO, _EIGHT = (numpy.float32(value) for value in (0, 1, 2, 8))
# Of float16: its smallest normal number, and what rounds below and above it.
_LEAST_NORMAL, _ROUNDER = numpy.float32(2.0**-14), numpy.float32(0.75)
_SPLITTER = numpy.float32(8193)


# Weighted squares


@jit
def nearest_weighted(x, w, steps, lowered, shifts, form, tables, codes):  # type: ignore[no-untyped-def]
    """Fill in the codes of vectors of 8 weights, float32 ``[n, 8]``, with steps of the same shape or ``[n, 1]``.

    Args:
        x, w, steps: values, weights of their errors, steps.
        lowered: int64 ``[n]``, which of the shifts each vector has; empty where they have none or may choose.
        shifts: float32 ``[2, 8]``.
        form: whether there are signs, even ones, and two shifts to choose from; bits of a place, codes of 8 weights.
        tables: a tuple as long as there are digits, their values, then `Halves`.
        codes: int32 ``[n, codes]``, filled in.
    """
    u, found = numpy.empty(8, numpy.float32), numpy.zeros(2, numpy.int64)
    scratch = _make_scratch(tables[0])
    _encode(x, w, steps, lowered, shifts, form, tables, scratch, u, found, codes)


@borrowing
def _encode(x, w, steps, lowered, shifts, form, tables, scratch, u, found, codes):  # type: ignore[no-untyped-def]
    signed, even, two, index_bits, many = form
    per = 2 if len(tables[0]) == 8 else 1
    share = per // many
    top = index_bits * share
    for v in range(len(x)):
        mask = _targets(x[v], w[v], 0, signed, even, u)
        fill(found, 0)
        turns = (lowered[v], lowered[v] + 1) if len(lowered) else (0, 2 if two else 1)
        step = load(steps[v], 0) if steps.shape[1] == 8 else spread(steps[v, 0])
        _best_points(u, w[v], 8, step, shifts, turns, tables, scratch, LARGEST, found)
        for code in range(many):
            value = numpy.int64(0)
            for part in range(share):
                value |= (found[code * share + part] >> 1) << part * index_bits
            if two:
                value |= (found[0] & 1) << top
            if signed:
                value |= (mask >> code * (8 // many) & ((1 << 8 // many) - 1)) << top
            codes[v, code] = value


@jit
def search_scales(x, w, form, shifts, tables, points, units, levels, lowered):  # type: ignore[no-untyped-def]
    """Improve units and levels (and shifts) of blocks, with all points chosen anew for each that is tried.

    Args:
        x, w: values and weights of their errors, float32 ``[blocks, 256]``.
        form: whether there are signs, even ones, two shifts for each code, or for each group; columns of a group, the
            greatest level, what a step is multiplied by, rounds.
        shifts: float32 ``[2, 8]``.
        tables: a tuple as long as there are digits, their values, then `Halves`.
        points: float32 ``[points, width]``.
        units: float32 ``[blocks]``, improved in place, as are ``levels`` and ``lowered`` uint8 ``[blocks, groups]``.
    """
    size, width = form[4], points.shape[1]
    tried, found = numpy.zeros((2, size // width), numpy.int64)
    own = (numpy.empty(256, numpy.float32), numpy.empty(8, numpy.float32), tried, found)
    scratch = _make_scratch(tables[0])
    _improve_blocks(x, w, form, shifts, tables, points, units, levels, lowered, scratch, own)


@borrowing
def _improve_blocks(x, w, form, shifts, tables, points, units, levels, lowered, scratch, own):  # type: ignore[no-untyped-def]
    signed, even, two, shared, size, top, unit, rounds = form
    groups, width = 256 // size, points.shape[1]
    u, scaled, tried, found = own
    for block in range(len(x)):
        for first in range(0, 256, 8):
            _targets(x[block], w[block], first, signed, even, u)
        for _ in range(rounds):
            product, square = 0.0, 0.0
            for group in range(groups):
                run = slice(group * size, group * size + size)
                mine, weights, best = u[run], w[block, run], LARGEST
                level, low = levels[block, group], lowered[block, group]
                fill(found, 0)
                for move in range(3):
                    other = numpy.int64(level) + (move if move < 2 else -1)
                    if other < 0 or other > top:
                        continue
                    step = spread(units[block] * (numpy.float32(2 * other + 1) * unit))
                    for number in range(2 if shared else 1):
                        turn = numpy.int64(low) ^ number
                        turns = (turn, turn + 1) if shared else (0, 2 if two else 1)
                        error = _best_points(
                            mine, weights, size, step, shifts, turns, tables, scratch, best, tried
                        )
                        if error < best:
                            best = error
                            copy(found, tried)
                            levels[block, group], lowered[block, group] = other, turn
                many = 2.0 * levels[block, group] + 1
                one, both = _moments(mine, weights, size, shifts, points, width, found, scaled)
                product += many * one
                square += many * many * both
            if square > 0 and product > 0:
                fitted = round_float16(numpy.float32(product / (square * unit)))
                units[block] = fitted if fitted > _ZERO else units[block]


@borrowing
def _moments(u, w, size, shifts, points, width, found, scaled):  # type: ignore[no-untyped-def]
    """Return ``sum w q u`` and ``sum w q^2`` of a group for the points found, in units of its step."""
    per, product, square = 8 // width, spread(_ZERO), spread(_ZERO)
    for eight in range(size // 8):
        for part in range(per):
            if per == 2:
                place = found[eight * per + part] >> 1
                for i in range(4):
                    scaled[4 * part + i] = points[place, i]
        value = load(scaled, 0) if per == 2 else load(points, 8 * (found[eight] >> 1))
        value += load(shifts, 8 * (found[eight * per] & 1))
        weighted = load(w, 8 * eight) * value
        product += weighted * load(u, 8 * eight)
        square += weighted * value
    return lane_sum(product), lane_sum(square)


@borrowing
def round_float16(value):  # type: ignore[no-untyped-def]
    """Round a number that is not negative, and within the range of float16, to float16."""
    if value < _LEAST_NORMAL:
        return (value + _ROUNDER) - _ROUNDER
    split = _SPLITTER * value
    return split - (split - value)


@inner
def _make_scratch(values):  # type: ignore[no-untyped-def]
    halves = 96 if len(values) == 3 else 64
    sums = (numpy.empty(halves, numpy.float32), numpy.empty(halves, numpy.float32))
    return (
        numpy.empty(64 * len(values), numpy.float32),
        numpy.empty((3, 4, 2), numpy.float32),
        numpy.zeros((2, 4, 2), numpy.int64),
        numpy.empty(2, numpy.int64),
        sums,
    )


@borrowing
def _targets(x, w, first, signed, even, u):  # type: ignore[no-untyped-def]
    """Fill in the targets of points for 8 columns from ``first`` on, and return the mask of negative signs."""
    if signed:
        return split_signs(x, w, first, even, u)
    store(u, first, load(x, first))
    return numpy.int64(0)


@borrowing
def _best_points(u, w, size, step, shifts, turns, tables, scratch, bound, found):  # type: ignore[no-untyped-def]
    """Return the error of ``size`` columns with their best points, or ``bound`` where it is not below.

    ``shifts`` float32 ``[2, 8]``, of which for each 8 columns those from the first to the last of ``turns`` may be
    chosen. ``found`` is filled with twice the places of points, and 1 where the second shift was chosen.
    """
    lanes, values, allowed, point_of, powers, patterns = tables
    errors, frees, places, trial, sums = scratch
    lost, per, many = _ZERO, 2 if len(lanes) == 8 else 1, 8 * len(lanes)
    for eight in range(size // 8):
        lowest = LARGEST
        for turn in range(turns[0], turns[1]):
            begin = (4 * turn + eight) * many
            one, other, here, there = _best_digits(
                u, w, 8 * eight, step, load(shifts, 8 * turn), lanes, values, powers, errors, begin
            )
            frees[turn, eight, 0], frees[turn, eight, 1] = one, other
            places[turn, eight, 0], places[turn, eight, 1] = here, there
            lowest = min(lowest, one + other)
        frees[2, eight, 0] = lowest
        lost += lowest
    if not lost < bound:
        return bound
    for eight in range(size // 8):
        lowest = frees[2, eight, 0]
        limit = lowest + (bound - lost)
        best = limit
        swapped = turns[1] - turns[0] == 2 and frees[1, eight, 0] < frees[0, eight, 0]
        for number in range(turns[0], turns[1]):
            turn = 1 - number if swapped else number
            spent = frees[turn, eight, 0] + frees[turn, eight, 1]
            for part in range(per):
                place = places[turn, eight, part]
                point, mine = point_of[place], frees[turn, eight, part]
                if point < 0 and spent < best:
                    begin = (4 * turn + eight) * many + 4 * part
                    point, error = _best_point(
                        errors,
                        begin,
                        place,
                        best - (spent - mine),
                        lanes,
                        allowed,
                        point_of,
                        patterns,
                        sums,
                    )
                    spent = spent - mine + error
                trial[part] = 2 * point + turn
                if point < 0:
                    spent = LARGEST
            if spent < best:
                best = spent
                for part in range(per):
                    found[eight * per + part] = trial[part]
        if not best < limit:
            return bound
        lost += best - lowest
    return lost


@borrowing
def _best_digits(x, w, place, step, shift, lanes, values, powers, errors, begin):  # type: ignore[no-untyped-def]
    """Choose the best digit for each of 8 values alone, points or not; values are ``step (v + shift)``.

    Return the errors of the first 4 (of points of 8 values: of all) and of the others, and the places in `Halves.point`
    of both. Fill ``errors`` from ``begin`` on with the errors of all digits of the 8 values, digit by digit.
    """
    mine, weights = load(x, place), load(w, place)
    best, found = spread(LARGEST), spread(_ZERO)
    for digit in range(len(lanes)):
        apart = step * (spread(values[digit]) + shift) - mine
        error = weights * apart * apart
        store(errors, begin + 8 * digit, error)
        found = pick(error, best, spread(numpy.float32(digit)), found)
        best = lesser(error, best)
    if len(lanes) == 3:
        return lane_sum(best), _ZERO, int(lane_sum(found * load(powers, 0))), 0
    low = pick(load(powers, 0), spread(_ONE), spread(_ZERO), best)
    return (
        lane_sum(low),
        lane_sum(best - low),
        int(lane_sum(found * load(powers, 0))),
        int(lane_sum(found * load(powers, 8))),
    )


@borrowing
def _best_point(errors, first, place, bound, lanes, allowed, point, patterns, sums):  # type: ignore[no-untyped-def]
    """Return the point with the smallest error, and that error; -1 where none is below ``bound``.

    ``lanes`` is a tuple as long as there are digits, so that loops are unrolled; ``errors`` and ``place`` come from
    `_best_digits`, and ``first`` is the first value in ``errors``.
    """
    row, back = sums
    count = 96 if len(lanes) == 3 else 64
    half, other = place // count, place % count
    if len(lanes) == 3:
        for chunk in range(0, 32, 8):
            found = _three_digits(errors, first + 4, patterns, chunk)
            for digit in range(3):
                store(back, 32 * digit + chunk, found + spread(errors[8 * digit + first + 7]))
    else:
        mine = column(errors, first + 2)
        for digit in range(8):
            store(back, 8 * digit, mine + spread(errors[8 * digit + first + 3]))
    rest = back[other]
    if len(lanes) == 3:
        low, left = errors[8 * (half // 32) + first + 3], half % 32
        for i in range(3):
            low, left = low + errors[8 * (left % 3) + first + i], left // 3
    else:
        low = errors[8 * (half % 8) + first] + errors[8 * (half // 8) + first + 1]
    best = min(low + _best_second_half(back, allowed, half, count), bound)
    taken = (half, low)
    if len(lanes) == 3:
        for chunk in range(0, 32, 8):
            found = _three_digits(errors, first, patterns, chunk)
            for digit in range(3):
                summed = found + spread(errors[8 * digit + first + 3])
                taken, best = _try_first_halves(
                    summed, 32 * digit + chunk, rest, half, taken, best, row, back, allowed, count
                )
    else:
        mine = column(errors, first)
        for digit in range(8):
            summed = mine + spread(errors[8 * digit + first + 1])
            taken, best = _try_first_halves(
                summed, 8 * digit, rest, half, taken, best, row, back, allowed, count
            )
    if not best < bound:
        return -1, bound
    front, whole = taken
    for chunk in range(0, count, 8):
        lasting = spread(whole) + (load(back, chunk) + load(allowed, front * count + chunk))
        bits = below(spread(best), lasting) ^ 255
        if bits:
            return point[front * count + chunk + first_bit(bits)], best
    return -1, bound


@borrowing
def _three_digits(errors, first, patterns, chunk):  # type: ignore[no-untyped-def]
    """Return the sums of 8 choices of 3 digits of three values, the first digit at ``first``."""
    start = errors[first] + errors[first + 1] + errors[first + 2]
    found = load(patterns, 192 + chunk) + spread(start)
    for i in range(3):
        zero = errors[first + i]
        found += load(patterns, 64 * i + chunk) * spread(errors[8 + first + i] - zero)
        found += load(patterns, 64 * i + 32 + chunk) * spread(errors[16 + first + i] - zero)
    return found


@borrowing
def _best_second_half(second, allowed, half, count):  # type: ignore[no-untyped-def]
    """Return the smallest sum of a second half that makes a point with the first one."""
    low = spread(LARGEST)
    for chunk in range(0, count, 8):
        low = lesser(load(second, chunk) + load(allowed, half * count + chunk), low)
    return lane_min(low)


@borrowing
def _try_first_halves(summed, lane, rest, half, taken, best, row, back, allowed, count):  # type: ignore[no-untyped-def]
    """Return the best first half so far and its error with the best second one: try 8 from ``lane`` on."""
    front, whole = taken
    bits = below(summed, spread(best - rest))
    if bits:
        store(row, 0, summed)
    while bits:
        place = first_bit(bits)
        bits &= bits - 1
        tried = lane + place
        alone = row[place]
        if tried != half:
            error = alone + _best_second_half(back, allowed, tried, count)
            if error < best:
                front, whole, best = tried, alone, error
    return (front, whole), best


# A whole metric


@jit
def nearest_in_metric(t, steps, shifts, points, form, eighth, metric, marginal, codes):  # type: ignore[no-untyped-def]
    """Fill in codes of points near vectors ``t`` ``[n, width * points of a code]`` under ``metric``.

    Args:
        t, steps, shifts: float32, of each vector.
        points: float32 ``[points, width]``.
        form: values of a point, points of a code, bits of a place; whether there are signs, even ones, and two shifts
            for a code to choose from.
        eighth: the size of these shifts.
        metric: float32, square.
        marginal: the metric of the first point where the second is free; unused where a code has one point.
        codes: int32 ``[n]``, filled in.
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
        step, code, best = steps[v], 0, LARGEST
        inverse = _ZERO if step == _ZERO else _ONE / step
        for turn in range(2 if two else 1):
            moved = shifts[v] if not two else eighth if turn == 0 else -eighth
            for i in range(columns):
                u[i] = t[v, i] * inverse - moved
            total, found, mask = _best_vector(u, metric, marginal, table, form, cache, scratch)
            if total < best:
                best, code = total, found | (mask | turn) << (index_bits * many)
        codes[v] = code


@inner
def _best_vector(u, metric, marginal, table, form, cache, scratch):  # type: ignore[no-untyped-def]
    """Return distance, place or places, and signs of the best of a few choices of signs for one vector."""
    width, many, index_bits, signed, even, _ = form
    base, free, last, known = cache
    pulls, slopes, masks, order, score = scratch
    columns, constant = width * many, _ZERO
    for i in range(columns):
        pulls[i] = _ZERO
        for j in range(columns):
            pulls[i] -= _TWO * metric[i, j] * u[j]
        constant -= pulls[i] * u[i] / _TWO
    best, found, taken = LARGEST, 0, 0
    masks[0], count, half = 0, 1, (1 << width) - 1
    if signed:
        count = _sign_choices(u, metric, columns, even, masks, order)
    for choice in range(count):
        mask = masks[choice]
        for i in range(columns):
            slopes[i] = -pulls[i] if mask >> i & 1 else pulls[i]
        low, high = (mask, mask) if many == 1 else (mask & half, mask >> width)
        for part in (low, high):
            if not known[part]:
                known[part] = True
                _quadratic_terms(table, metric, 0, part, base[part])
                if many > 1:
                    _quadratic_terms(table, marginal, 0, part, free[part])
                    _quadratic_terms(table, metric, width, part, last[part])
        if many == 1:
            place, total = _nearest_point(table, base[mask], slopes)
        else:
            tables = (base[low], free[low], last[high])
            total, place = _best_pair(
                table, tables, metric, marginal, u, slopes, mask, score, index_bits
            )
        if total + constant < best:
            best, found, taken = total + constant, place, mask
    return best, found, taken


@borrowing
def _sign_choices(u, metric, columns, even, masks, order):  # type: ignore[no-untyped-def]
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
    masks[0], masks[1], masks[2], masks[3] = mask, mask ^ a, mask ^ b, mask ^ c
    masks[4] = mask ^ a ^ b
    return 5


@inner
def _best_pair(table, tables, metric, marginal, u, slopes, mask, score, index_bits):  # type: ignore[no-untyped-def]
    """Return score and places of two points: first points by the distance that no second one can make up for."""
    width, (base, free, last) = table.shape[0], tables
    mine, later = numpy.empty(width, numpy.float32), numpy.empty(width, numpy.float32)
    for i in range(width):
        pull = _ZERO
        for j in range(width):
            pull -= _TWO * marginal[i, j] * u[j]
        mine[i] = -pull if mask >> i & 1 else pull
    first = numpy.empty(FIRST, numpy.int64)
    for p in range(0, table.shape[1], 8):
        store(score, p, _scores(table, free, mine, p))
    for number in range(FIRST):
        first[number] = _least_score(score)
        score[first[number]] = LARGEST
    best, found = LARGEST, 0
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
        q, rest = _nearest_point(table, last, later)
        if known + rest < best:
            best, found = known + rest, p | q << index_bits
    return best, found


@borrowing
def _quadratic_terms(table, metric, first, mask, out):  # type: ignore[no-untyped-def]
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
def _nearest_point(table, base, slopes):  # type: ignore[no-untyped-def]
    """Return the point with the smallest score, the first of equal ones, and that score."""
    best, number = spread(LARGEST), load(LANE_NUMBERS, 0)
    found = number
    for p in range(0, table.shape[1], 8):
        score = _scores(table, base, slopes, p)
        found = pick(score, best, number, found)
        best = lesser(score, best)
        number += spread(_EIGHT)
    return first_of(best, found)


@borrowing
def _least_score(score):  # type: ignore[no-untyped-def]
    """Return the place of the smallest score, the first of equal ones."""
    best, number = spread(LARGEST), load(LANE_NUMBERS, 0)
    found = number
    for p in range(0, len(score), 8):
        tried = load(score, p)
        found = pick(tried, best, number, found)
        best = lesser(tried, best)
        number += spread(_EIGHT)
    return first_of(best, found)[0]


@borrowing
def _scores(table, base, slopes, p):  # type: ignore[no-untyped-def]
    """Return ``base + table slopes`` of 8 points, ``table`` ``[width, points]``."""
    if table.shape[0] == 8:
        return load(base, p) + (
            _four_coordinates(table, 0, slopes, p) + _four_coordinates(table, 4, slopes, p)
        )
    return load(base, p) + _four_coordinates(table, 0, slopes, p)


@borrowing
def _four_coordinates(table, first, slopes, p):  # type: ignore[no-untyped-def]
    """Return what 4 coordinates from ``first`` on add to the scores of 8 points."""
    start, size = first * table.shape[1] + p, table.shape[1]
    summed = spread(slopes[first]) * load(table, start)
    for i in range(1, 4):
        summed += spread(slopes[first + i]) * load(table, start + i * size)
    return summed
