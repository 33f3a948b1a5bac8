"""The nearest point under weighted squares, by `halves`; loops that numba compiles.

A point is measured by sums in another order than one after the other, always the same, so that of points whose errors
differ by rounding alone either may be taken.
"""

from __future__ import annotations

import numpy

from quantforge.packers.ggml.panel_loops import borrowing
from quantforge.packers.lattices.eights import (
    below,
    column,
    first_bit,
    least,
    lesser,
    load,
    pick,
    spread,
    store,
    total,
)

_ZERO, _ONE = numpy.float32(0), numpy.float32(1)
_LARGEST = numpy.float32(3.4028234663852886e38)


@borrowing
def free(x, w, place, step, shift, lanes, values, powers, errors, begin):  # type: ignore[no-untyped-def]
    """Choose the best digit for each of 8 values alone, no matter if these are points; it is ``step (digit + shift)``.

    Returns the errors of the first 4 (of points of 8 values: of all) and of the others, and the places in
    `Halves.point` of both. ``errors``, filled in from ``begin`` on, has the errors of all digits of the 8 values, digit
    by digit.
    """
    mine, weights = load(x, place), load(w, place)
    best, found = spread(_LARGEST), spread(_ZERO)
    for digit in range(len(lanes)):
        apart = step * (spread(values[digit]) + shift) - mine
        error = weights * apart * apart
        store(errors, begin + 8 * digit, error)
        found = pick(error, best, spread(numpy.float32(digit)), found)
        best = lesser(error, best)
    if len(lanes) == 3:
        return total(best), _ZERO, int(total(found * load(powers, 0))), 0
    low = pick(load(powers, 0), spread(_ONE), spread(_ZERO), best)
    return (
        total(low),
        total(best - low),
        int(total(found * load(powers, 0))),
        int(total(found * load(powers, 8))),
    )


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
def _completed(second, allowed, half, count):  # type: ignore[no-untyped-def]
    """Return the least sum of a second half that makes a point with the first one."""
    low = spread(_LARGEST)
    for chunk in range(0, count, 8):
        low = lesser(load(second, chunk) + load(allowed, half * count + chunk), low)
    return least(low)


@borrowing
def _better(summed, lane, rest, half, taken, best, row, back, allowed, count):  # type: ignore[no-untyped-def]
    """Return the best first half and its error with the best second one, after 8 from ``lane`` on; not ``half``."""
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
            error = alone + _completed(back, allowed, tried, count)
            if error < best:
                front, whole, best = tried, alone, error
    return (front, whole), best


@borrowing
def tied(errors, first, place, bound, lanes, allowed, point, patterns, sums):  # type: ignore[no-untyped-def]
    """Return the point with the least error, and that; -1 where none is below ``bound``.

    ``lanes`` is a tuple as long as there are digits, so that loops are unrolled. ``errors`` are those of `free`,
    ``first`` the first value in it, ``place`` what `free` returned.
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
    best = min(low + _completed(back, allowed, half, count), bound)
    taken = (half, low)
    if len(lanes) == 3:
        for chunk in range(0, 32, 8):
            found = _three_digits(errors, first, patterns, chunk)
            for digit in range(3):
                summed = found + spread(errors[8 * digit + first + 3])
                taken, best = _better(
                    summed, 32 * digit + chunk, rest, half, taken, best, row, back, allowed, count
                )
    else:
        mine = column(errors, first)
        for digit in range(8):
            summed = mine + spread(errors[8 * digit + first + 1])
            taken, best = _better(
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
