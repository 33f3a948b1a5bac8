"""The cuts of a sorted group into -1, 0 and 1 that ggml finds for IQ1_S and IQ1_M, to the last bit.

With prefix sums ``X`` of ``w x`` and ``W`` of ``w`` the sums of a way ``(i1, i2)`` under a choice ``k`` of shifts are
``p_k - X[i1] - X[i2]`` and ``q_k + C_k[i1] - E_k[i2]``, so that 8 ways are a few instructions. They are not in ggml's
order, and only tell which ways can be the best: those within `REACH` of the greatest ``product^2 / square``. Rounding
moves a value by less than half of it, also where each way in it ties with the next one. These alone are then
tried as ggml tries them. Sums so small or large that they could leave the range of float32 are all tried.
"""

from __future__ import annotations

import numpy

from quantforge.packers.ggml.panel_loops import borrowing, fill
from quantforge.packers.lattices.eights import (
    below,
    first_bit,
    greater,
    load,
    most,
    pick,
    spread,
    store,
)

REACH = numpy.float32(1e-3)  # for 32 values, of 16 it is half
_ZERO, _ONE, _TWO = numpy.float32(0), numpy.float32(1), numpy.float32(2)
_EIGHTH = numpy.float32(0.125)
# Of the first half and of the second, by choice.
_SHIFTS_OF_TWO = _EIGHTH * numpy.array([*[1, -1] * 4, *[1, -1] * 4], numpy.float32)
_SHIFTS_OF_FOUR = _EIGHTH * numpy.array([*[1, 1, -1, -1] * 2, *[1, -1, 1, -1] * 2], numpy.float32)
_LOWEST = numpy.float32(-3.4028234663852886e38)
_TINY, _HUGE = numpy.float32(1e-14), numpy.float32(1e14)


@borrowing
def in_order(x, order, ranks):  # type: ignore[no-untyped-def]
    """Fill ``order`` with the places of ``x`` by rising value; equal ones keep their order."""
    size, one, zero = len(x), spread(_ONE), spread(_ZERO)
    for first in range(0, size, 8):
        mine, rank = load(x, first), zero
        for j in range(size):
            rank += pick(spread(x[j]), mine, one, zero)
        store(ranks, first, rank)
    fill(order, -1)
    for i in range(size):
        place = int(ranks[i])
        while order[place] >= 0:  # an equal one before it
            place += 1
        order[place] = i


@borrowing
def _prepared(x, w, order, ways, sums, rise, under, over):  # type: ignore[no-untyped-def]
    """Fill in what the two sums of all ways are made of, and the prefix sums; say whether these are in range.

    Lanes are choices, over and over; those after the last cut repeat it.
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
    return min(large, allw) > _TINY and max(large, allw) < _HUGE


@borrowing
def _value(rise, under, place, moved, raised):  # type: ignore[no-untyped-def]
    product = load(rise, place) - moved
    return product * product / (load(under, place) + raised)


@borrowing
def _shared(sums, first, second, k):  # type: ignore[no-untyped-def]
    """Return ggml's sums of a way for a whole group with one shift."""
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
def _halved(x, w, order, first, second, k):  # type: ignore[no-untyped-def]
    """Return ggml's sums of a way for two halves with a shift each."""
    product, square, half = _ZERO, _ZERO, len(x) // 2
    for j in range(len(x)):
        i = order[j]
        lowered = k >> 1 if i < half else k & 1
        digit = _ONE if j >= second else _ZERO if j >= first else -_ONE
        value = digit + (-_EIGHTH if lowered else _EIGHTH)
        product += w[i] * value * x[i]
        square += w[i] * value * value
    return product, square


@borrowing
def best_cuts(x, w, order, ways, scratch):  # type: ignore[no-untyped-def]
    """Return scale, first and second cut and choice of shifts of the best way; no way: cuts of -1.

    ``ways`` is 2 for one shift (choice 1: lowered), 4 for two halves with a shift each (two bits, the first above).
    """
    size = len(x)
    sums, rise, under, over, rows = scratch
    in_range = _prepared(x, w, order, ways, sums, rise, under, over)
    stop, top = (size + 1) * ways, spread(_ZERO)
    for i1 in range(size + 1):
        moved, raised = spread(sums[0][i1]), load(over, i1 * 8)
        row = spread(_ZERO)
        for place in range(i1 * ways, stop, 8):
            row = greater(_value(rise, under, place, moved, raised), row)
        store(rows, i1 * 8, row)
        top = greater(row, top)
    limit = most(top) * (_ONE - REACH * numpy.float32(size) / numpy.float32(32))
    limits = spread(limit if in_range else _LOWEST)
    best, scale, first, second, choice = _LOWEST, _ZERO, -1, -1, -1
    for i1 in range(size + 1):
        if in_range and not below(limits, load(rows, i1 * 8)):
            continue
        moved, raised = spread(sums[0][i1]), load(over, i1 * 8)
        for start in range(i1 * ways, stop, 8):
            bits = numpy.int64(255)
            if in_range:
                bits = below(limits, _value(rise, under, start, moved, raised))
            while bits:
                place = start + first_bit(bits)
                bits &= bits - 1
                if place >= stop:
                    break
                i2, k = place // ways, place % ways
                if ways == 2:
                    product, square = _shared(sums, i1, i2, k)
                else:
                    product, square = _halved(x, w, order, i1, i2, k)
                if square > _ZERO and product * product > best * square:
                    scale = product / square
                    best = scale * product
                    first, second, choice = i1, i2, k
    return scale, first, second, choice
