"""Loops of `search`, compiled by numba, each at its first call in a process.

Sixty-four rows are computed side by side (a panel). A group is then a run of columns of ``[columns, 64]``, and a sum
over it is 64 sums in the order of the columns. All of it is vector instructions, and no sum has to be reordered for
them, which would make results depend on the processor. All scratch is one array with fixed places (`_STEP` ...),
because the compiler then knows that they do not overlap.
"""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import inner, jit
from quantforge.packers.ggml.grid import LANES
from quantforge.packers.ggml.row_loops import CACHE_LINE_FLOATS, look_up, round_and_clamp

UNROLLED_COLUMNS = 4  # columns between two visits to the sums
_ZERO = numpy.float32(0)
_ONE, _TWO = numpy.float32(1), numpy.float32(2)
_INFINITY = numpy.float32(numpy.inf)
# Of the squares of the codes: less is a rounding error of equal codes.
_MIN_VARIANCE_SHARE = numpy.float32(1e-5)
# Places in the scratch.
_STEP, _OFFSET, _INVERSE = 0, LANES, 2 * LANES  # of the candidate
_ERROR, _SQUARES, _ONES, _PRODUCTS, _RESIDUE = (place * LANES for place in range(3, 8))
_LOW, _HIGH, _EXTREME, _WEIGHT = (place * LANES for place in range(8, 12))  # of the group
_BEST = 12 * LANES  # seven places: error, then what belongs to it
_RATIOS = 19 * LANES  # of a group with a table, 32 places, and as many for its values
_VALUES = _RATIOS + 32 * LANES
_SCRATCH = _VALUES + 32 * LANES


@jit
def arrange_panels(rows, importance, x, weights):  # type: ignore[no-untyped-def]
    """Fill ``x`` and ``weights`` ``[panels, columns, LANES]``; see `search.arrange_panels`."""
    # A cache line of each row at a time: rows are often a power of two apart, and would evict each other.
    for row in range(x.shape[0] * LANES):
        if row >= rows.shape[0]:
            x[row // LANES, :, row % LANES] = _ZERO
    for panel in range(x.shape[0]):
        count = min(LANES, rows.shape[0] - panel * LANES)
        for first in range(0, x.shape[1], CACHE_LINE_FLOATS):
            for lane in range(count):
                for index in range(CACHE_LINE_FLOATS):
                    x[panel, first + index, lane] = rows[panel * LANES + lane, first + index]
    mean = numpy.empty(LANES, numpy.float32)
    for panel in range(x.shape[0]):
        mean[:] = _ZERO
        for column in range(x.shape[1]):
            for lane in range(LANES):
                mean[lane] += x[panel, column, lane] * x[panel, column, lane]
        for lane in range(LANES):
            mean[lane] /= numpy.float32(x.shape[1])
        for column in range(x.shape[1]):
            share = importance[column]
            for lane in range(LANES):
                value = x[panel, column, lane]
                weights[panel, column, lane] = share * numpy.sqrt(value * value + mean[lane])


@jit
def fit_groups(x, w, starts, polish, affine, below, low, high, middles, rises, found):  # type: ignore[no-untyped-def]
    """Fill ``found`` with step and offset of each group; see `search.fit_groups`."""
    s = numpy.empty(_SCRATCH, numpy.float32)
    size = x.shape[1] // found.shape[2]
    for panel in range(x.shape[0]):
        for group in range(found.shape[2]):
            columns = slice(group * size, group * size + size)
            xs, ws = x[panel, columns], w[panel, columns]
            _describe_group(xs, ws, s)
            for lane in range(LANES):
                least = s[_LOW + lane]
                least = _ZERO if below and least > _ZERO else least
                s[_LOW + lane] = least
                s[_BEST + lane], s[_BEST + LANES + lane] = _INFINITY, _ZERO
                s[_BEST + 2 * LANES + lane] = least if affine else _ZERO
                s[_BEST + 3 * LANES + lane] = _ZERO
            for trial in range(len(starts) + polish):
                if trial < len(starts):
                    _start_candidate(s, starts[trial, 0], starts[trial, 1], affine, high)
                else:
                    for lane in range(LANES):
                        s[_STEP + lane] = s[_BEST + LANES + lane]
                        s[_OFFSET + lane] = s[_BEST + 2 * LANES + lane]
                _measure_candidate(xs, ws, s, low, high, middles, rises)
                _improve_best(s, affine, below)
            for lane in range(LANES):
                s[_BEST + 4 * LANES + lane] = s[_WEIGHT + lane]
            for part in range(4):
                for lane in range(LANES):
                    found[part, panel, group, lane] = s[_BEST + (part + 1) * LANES + lane]


@jit
def choose_integers(x, w, start, units, moves, low, high, middles, rises, found):  # type: ignore[no-untyped-def]
    """Fill ``found`` with the best integers of each group; see `search.choose_integers`. ``moves`` begin with the limits."""
    s = numpy.empty(_SCRATCH, numpy.float32)
    groups = start.shape[2]
    size, share = x.shape[1] // groups, groups // units.shape[2]
    least, most = moves[0, 0], moves[0, 1]
    for panel in range(x.shape[0]):
        for group in range(groups):
            columns = slice(group * size, group * size + size)
            xs, ws = x[panel, columns], w[panel, columns]
            for lane in range(LANES):
                s[_BEST + lane] = _INFINITY
            for move in range(1, len(moves)):
                for lane in range(LANES):
                    unit = units[0, panel, group // share, lane]
                    lowering = units[1, panel, group // share, lane]
                    ratio = start[0, panel, group, lane] / (_ONE if unit == _ZERO else unit)
                    scale = round_and_clamp(
                        round_and_clamp(ratio, least, most) + moves[move, 0], least, most
                    )
                    ratio = -start[1, panel, group, lane] / (
                        _ONE if lowering == _ZERO else lowering
                    )
                    lowered = round_and_clamp(
                        round_and_clamp(ratio, least, most) + moves[move, 1], least, most
                    )
                    s[_LOW + lane], s[_HIGH + lane] = scale, lowered
                    s[_STEP + lane], s[_OFFSET + lane] = unit * scale, -(lowering * lowered)
                _measure_candidate(xs, ws, s, low, high, middles, rises)
                for lane in range(LANES):
                    better = s[_ERROR + lane] < s[_BEST + lane]
                    for part in range(5):
                        place = _BEST + part * LANES + lane
                        s[place] = s[_ERROR + part * LANES + lane] if better else s[place]
                    one, two = _BEST + 5 * LANES + lane, _BEST + 6 * LANES + lane
                    s[one] = s[_LOW + lane] if better else s[one]
                    s[two] = s[_HIGH + lane] if better else s[two]
            for part in range(7):
                for lane in range(LANES):
                    found[part, panel, group, lane] = s[_BEST + part * LANES + lane]


@inner
def _describe_group(x, w, s):  # type: ignore[no-untyped-def]
    """Find the range, the value of largest magnitude and the sum of weights of one group."""
    for lane in range(LANES):
        s[_LOW + lane], s[_HIGH + lane] = _INFINITY, -_INFINITY
        s[_WEIGHT + lane] = _ZERO
    for index in range(x.shape[0]):
        for lane in range(LANES):
            value = x[index, lane]
            low, high = s[_LOW + lane], s[_HIGH + lane]
            s[_LOW + lane] = value if value < low else low
            s[_HIGH + lane] = value if value > high else high
            s[_WEIGHT + lane] += w[index, lane]
    for lane in range(LANES):
        low, high = s[_LOW + lane], s[_HIGH + lane]
        s[_EXTREME + lane] = high if high > -low else low


@inner
def _start_candidate(s, first, last, affine, high):  # type: ignore[no-untyped-def]
    """Set step and offset of a candidate from one of `Trials.starts`."""
    for lane in range(LANES):
        if affine:
            least, whole = s[_LOW + lane], s[_HIGH + lane] - s[_LOW + lane]
            s[_OFFSET + lane] = least + whole * first
            s[_STEP + lane] = whole * (_ONE - first - last) / high
        else:
            s[_OFFSET + lane] = _ZERO
            s[_STEP + lane] = s[_EXTREME + lane] / first


@inner
def _measure_candidate(x, w, s, low, high, middles, rises):  # type: ignore[no-untyped-def]
    """Fill in the sums over one group ``x``, ``w`` ``[size, LANES]`` for the candidate in the scratch."""
    for lane in range(LANES):
        step = s[_STEP + lane]
        s[_INVERSE + lane] = _ZERO if step == _ZERO else _ONE / step
        s[_ERROR + lane] = _ZERO
        s[_SQUARES + lane] = _ZERO
        s[_ONES + lane] = _ZERO
        s[_PRODUCTS + lane] = _ZERO
        s[_RESIDUE + lane] = _ZERO
    if middles is not None:
        for index in range(x.shape[0]):
            for lane in range(LANES):
                ratio = (x[index, lane] - s[_OFFSET + lane]) * s[_INVERSE + lane]
                s[_RATIOS + index * LANES + lane] = ratio
        look_up(s, _RATIOS, _VALUES, x.shape[0] * LANES, low, middles, rises)
        for index in range(x.shape[0]):
            for lane in range(LANES):
                value, weight = s[_VALUES + index * LANES + lane], w[index, lane]
                rest = x[index, lane] - s[_OFFSET + lane] - s[_STEP + lane] * value
                weighted, owed = weight * value, weight * rest
                s[_ERROR + lane] += owed * rest
                s[_SQUARES + lane] += weighted * value
                s[_ONES + lane] += weighted
                s[_PRODUCTS + lane] += owed * value
                s[_RESIDUE + lane] += owed
        return
    for first in range(0, x.shape[0], UNROLLED_COLUMNS):
        for lane in range(LANES):
            step, offset, inverse = s[_STEP + lane], s[_OFFSET + lane], s[_INVERSE + lane]
            error, squares, ones = s[_ERROR + lane], s[_SQUARES + lane], s[_ONES + lane]
            products, residue = s[_PRODUCTS + lane], s[_RESIDUE + lane]
            for index in range(UNROLLED_COLUMNS):
                above, weight = x[first + index, lane] - offset, w[first + index, lane]
                value = round_and_clamp(above * inverse, low, high)
                rest = above - step * value
                weighted, owed = weight * value, weight * rest
                error += owed * rest
                squares += weighted * value
                ones += weighted
                products += owed * value
                residue += owed
            s[_ERROR + lane], s[_SQUARES + lane], s[_ONES + lane] = error, squares, ones
            s[_PRODUCTS + lane], s[_RESIDUE + lane] = products, residue


@inner
def _improve_best(s, affine, below):  # type: ignore[no-untyped-def]
    """Fit step and offset to the codes of the candidate; keep them where they are better."""
    for lane in range(LANES):
        step, offset = s[_STEP + lane], s[_OFFSET + lane]
        error, squares, products = s[_ERROR + lane], s[_SQUARES + lane], s[_PRODUCTS + lane]
        ones, residue, weight = s[_ONES + lane], s[_RESIDUE + lane], s[_WEIGHT + lane]
        if affine:
            spread = squares - ones * ones / weight
            shared = products - ones * residue / weight
            change = shared / spread
            moved = (residue - change * ones) / weight
            fallen = shared * change + residue * residue / weight
            equal = not spread > _MIN_VARIANCE_SHARE * squares
            above = below and (equal or offset + moved > _ZERO)
            at_zero = products + offset * ones
            change = at_zero / squares if above else change
            moved = -offset if above else moved
            gained = at_zero * change - _TWO * offset * residue - offset * offset * weight
            fallen = gained if above else fallen
            possible = (above or not equal) and step + change > _ZERO
        else:
            change, moved = products / squares, _ZERO
            fallen = products * change
            possible = squares > _ZERO
        error -= fallen
        better = possible & (error < s[_BEST + lane])
        s[_BEST + lane] = error if better else s[_BEST + lane]
        one, two = _BEST + LANES + lane, _BEST + 2 * LANES + lane
        three = _BEST + 3 * LANES + lane
        s[one] = step + change if better else s[one]
        s[two] = offset + moved if better else s[two]
        s[three] = squares if better else s[three]
