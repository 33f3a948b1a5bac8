"""Nearest vectors of lattices under weighted squares, and the scales that minimise these; loops that numba compiles.

Each sign is that of its weight; where an even number must be negative, the cheapest is turned. So only magnitudes are
looked for, by `half_loops`, 8 columns at a time: one point of 8 values, or two of 4.
"""

from __future__ import annotations

import numpy

from quantforge.packers.ggml.panel_loops import borrowing, copy, fill, inner, jit
from quantforge.packers.lattices.eights import below, load, pick, spread, store, total
from quantforge.packers.lattices.half_loops import free, tied
from quantforge.packers.lattices.near_loops import LANES, first_of

_ZERO, _ONE = numpy.float32(0), numpy.float32(1)
_LARGEST = numpy.float32(3.4028234663852886e38)
_LEAST_NORMAL, _ROUNDER = numpy.float32(2.0**-14), numpy.float32(0.75)  # of float16
_SPLITTER = numpy.float32(8193)


@borrowing
def _magnitudes(x, w, signed, even, u):  # type: ignore[no-untyped-def]
    """Fill in what points are to be near to, for 8 columns, and return the signs."""
    if not signed:
        store(u, 0, load(x, 0))
        return numpy.int64(0)
    value, zero = load(x, 0), spread(_ZERO)
    store(u, 0, pick(value, zero, zero - value, value))
    mask = below(value, zero)
    odd = mask ^ mask >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    if even and odd & 1:
        cheapest, _ = first_of(load(w, 0) * value * value, load(LANES, 0))
        u[cheapest], mask = -u[cheapest], mask ^ 1 << cheapest
    return mask


@borrowing
def _measured(u, w, size, step, shifts, turns, tables, scratch, bound, found):  # type: ignore[no-untyped-def]
    """Return the error of ``size`` columns with their best points; where it is not below ``bound``, that.

    ``shifts`` float32 ``[2, 8]``, of which for each 8 columns those from the first to the last of ``turns`` may be
    chosen. ``found`` is filled with twice the places of points, and 1 where the second shift was chosen.
    """
    lanes, values, allowed, point_of, powers, patterns = tables
    errors, frees, places, trial, sums = scratch
    lost, per, many = _ZERO, 2 if len(lanes) == 8 else 1, 8 * len(lanes)
    for eight in range(size // 8):
        lowest = _LARGEST
        for turn in range(turns[0], turns[1]):
            begin = (4 * turn + eight) * many
            one, other, here, there = free(
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
                    point, error = tied(
                        errors, begin, place, best - (spent - mine), lanes, allowed, point_of, patterns, sums
                    )  # fmt: skip
                    spent = spent - mine + error
                trial[part] = 2 * point + turn
                if point < 0:
                    spent = _LARGEST
            if spent < best:
                best = spent
                for part in range(per):
                    found[eight * per + part] = trial[part]
        if not best < limit:
            return bound
        lost += best - lowest
    return lost


@inner
def _scratch(values):  # type: ignore[no-untyped-def]
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
def _coded(x, w, steps, lowered, shifts, form, tables, scratch, u, found, codes):  # type: ignore[no-untyped-def]
    signed, even, two, index_bits, many = form
    per = 2 if len(tables[0]) == 8 else 1
    share = per // many
    top = index_bits * share
    for v in range(len(x)):
        mask = _magnitudes(x[v], w[v], signed, even, u)
        fill(found, 0)
        turns = (lowered[v], lowered[v] + 1) if len(lowered) else (0, 2 if two else 1)
        step = load(steps[v], 0) if steps.shape[1] == 8 else spread(steps[v, 0])
        _measured(u, w[v], 8, step, shifts, turns, tables, scratch, _LARGEST, found)
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
def nearest(x, w, steps, lowered, shifts, form, tables, codes):  # type: ignore[no-untyped-def]
    """Fill in the codes of vectors of 8 weights, float32 ``[n, 8]``, with steps of the same shape or ``[n, 1]``.

    Args:
        x, w, steps: values, weights of their errors, steps.
        lowered: int64 ``[n]``, which of the shifts each vector has; empty where they have none or may choose.
        shifts: float32 ``[2, 8]``.
        form: whether there are signs, even ones, and two shifts to choose from; bits of a place, codes of 8 weights.
        tables: a tuple as long as there are digits, their values, then those of `halves`.
        codes: int32 ``[n, codes]``, filled in.
    """
    u, found = numpy.empty(8, numpy.float32), numpy.zeros(2, numpy.int64)
    scratch = _scratch(tables[0])
    _coded(x, w, steps, lowered, shifts, form, tables, scratch, u, found, codes)


@borrowing
def half(value):  # type: ignore[no-untyped-def]
    """Round a number from 0 on as float16 does, but for those above its range."""
    if value < _LEAST_NORMAL:
        return (value + _ROUNDER) - _ROUNDER
    split = _SPLITTER * value
    return split - (split - value)


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
    return total(product), total(square)


@borrowing
def _improved(x, w, form, shifts, tables, points, units, levels, lowered, scratch, own):  # type: ignore[no-untyped-def]
    signed, even, two, shared, size, top, unit, rounds = form
    groups, width = 256 // size, points.shape[1]
    u, scaled, tried, found = own
    for block in range(len(x)):
        for first in range(0, 256, 8):
            run = slice(first, first + 8)
            _magnitudes(x[block, run], w[block, run], signed, even, u[run])
        for _ in range(rounds):
            product, square = 0.0, 0.0
            for group in range(groups):
                run = slice(group * size, group * size + size)
                mine, weights, best = u[run], w[block, run], _LARGEST
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
                        error = _measured(
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
                fitted = half(numpy.float32(product / (square * unit)))
                units[block] = fitted if fitted > _ZERO else units[block]


@jit
def search(x, w, form, shifts, tables, points, units, levels, lowered):  # type: ignore[no-untyped-def]
    """Improve units and levels (and shifts) of blocks, with all points chosen anew for each that is tried.

    Args:
        x, w: values and weights of their errors, float32 ``[blocks, 256]``.
        form: whether there are signs, even ones, two shifts for each code, or for each group; columns of a group, the
            greatest level, what a step is multiplied with, how often.
        shifts: float32 ``[2, 8]``.
        tables: a tuple as long as there are digits, their values, then those of `halves`.
        points: float32 ``[points, width]``.
        units: float32 ``[blocks]``, improved in place, as are ``levels`` and ``lowered`` uint8 ``[blocks, groups]``.
    """
    size, width = form[4], points.shape[1]
    tried, found = numpy.zeros((2, size // width), numpy.int64)
    own = (numpy.empty(256, numpy.float32), numpy.empty(8, numpy.float32), tried, found)
    scratch = _scratch(tables[0])
    _improved(x, w, form, shifts, tables, points, units, levels, lowered, scratch, own)
