"""ggml's searches for the scale of one group, in loops that numba compiles: equal to ggml's to the last bit.

`reference` says what each of them is in ggml. Arrays are ``[size, groups]``. Sixty-four groups are computed side by
side: then 64 sums, each in the order of its elements, are vector instructions. ggml's own loops over one group cannot
be that. Numbers of a group that change are in one array with fixed places (`_EXTREME` ..., `_ONES` ...), because the
compiler then knows that they do not overlap.
"""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import inner, jit
from quantforge.packers.ggml.grid import LANES
from quantforge.packers.ggml.row_loops import look_up, round_and_clamp
from quantforge.packers.ggml.search_loops import UNROLLED_COLUMNS

EPSILON = numpy.float32(1e-15)  # a group below it is empty
_ZERO, _ONE = numpy.float32(0), numpy.float32(1)
# Places in the scratch of all searches.
_PRODUCTS, _SQUARES, _SCALE, _BEST, _INVERSE, _CANDIDATE = (place * LANES for place in range(6))
# Of grids around 0.
_EXTREME = 6 * LANES
_RATIOS = 7 * LANES  # of a group with a table, 32 places, and as many for its values
_VALUES = _RATIOS + 32 * LANES
_SCRATCH = _VALUES + 32 * LANES
# Of grids with a minimum.
_ONES, _LEAST, _MOST, _WEIGHT = (place * LANES for place in range(6, 10))
_MEAN, _ERROR, _FITTED, _LOWEST = (place * LANES for place in range(10, 14))
_AFFINE_SCRATCH = 14 * LANES


@jit
def mean_squares(rows, found):  # type: ignore[no-untyped-def]
    """Fill ``found`` with the result of `reference.mean_squares`."""
    for row in range(rows.shape[0]):
        total = _ZERO
        for value in rows[row]:
            total += value * value
        found[row] = total / numpy.float32(rows.shape[1])


@jit
def signed_extreme(x, found):  # type: ignore[no-untyped-def]
    """Fill ``found`` with the result of `reference.signed_extreme`."""
    s = numpy.empty(_SCRATCH, numpy.float32)
    xs = numpy.empty((x.shape[0], LANES), numpy.float32)
    for first in range(0, x.shape[1], LANES):
        _load_panel(x, first, xs)
        _find_extremes(xs, s)
        for lane in range(min(LANES, x.shape[1] - first)):
            found[first + lane] = s[_EXTREME + lane]


# Grids around 0


@jit
def search_symmetric(x, weights, high, numerators, scales, codes):  # type: ignore[no-untyped-def]
    """Search as `reference.symmetric` does; the first of the ``numerators`` is taken whatever error it leaves."""
    s = numpy.empty(_SCRATCH, numpy.float32)
    xs = numpy.empty((x.shape[0], LANES), numpy.float32)
    ws = numpy.empty((x.shape[0], LANES), numpy.float32)
    low, top = -high, high - _ONE
    for first in range(0, x.shape[1], LANES):
        _load_panel(x, first, xs)
        _load_panel(weights, first, ws)
        _find_extremes(xs, s)
        for trial in range(len(numerators)):
            _sum_codes(xs, ws, s, -numerators[trial], low, top)
            if trial == 0:
                _start_best(s)
            else:
                _update_best(s)
        count = min(LANES, x.shape[1] - first)
        for lane in range(count):
            empty = abs(s[_EXTREME + lane]) < EPSILON
            scales[first + lane] = _ZERO if empty else s[_SCALE + lane]
        for index in range(x.shape[0]):
            for lane in range(LANES):
                code = round_and_clamp(s[_INVERSE + lane] * xs[index, lane], low, top)
                xs[index, lane] = low if abs(s[_EXTREME + lane]) < EPSILON else code
        _store_panel(xs, first, codes)


@jit
def search_table_scale(x, weights, ratios, low, middles, rises, scales):  # type: ignore[no-untyped-def]
    """Search as `reference.from_table` does; inverses are ``ratios / extreme``."""
    s = numpy.empty(_SCRATCH, numpy.float32)
    xs = numpy.empty((x.shape[0], LANES), numpy.float32)
    ws = numpy.empty((x.shape[0], LANES), numpy.float32)
    for first in range(0, x.shape[1], LANES):
        _load_panel(x, first, xs)
        _load_panel(weights, first, ws)
        _find_extremes(xs, s)
        for trial in range(len(ratios)):
            for lane in range(LANES):
                extreme = s[_EXTREME + lane]
                inverse = ratios[trial] / extreme
                s[_CANDIDATE + lane] = _ONE / (-extreme / low) if trial == 0 else inverse
                s[_PRODUCTS + lane], s[_SQUARES + lane] = _ZERO, _ZERO
            for index in range(x.shape[0]):
                for lane in range(LANES):
                    s[_RATIOS + index * LANES + lane] = s[_CANDIDATE + lane] * xs[index, lane]
            look_up(s, _RATIOS, _VALUES, x.shape[0] * LANES, low, middles, rises)
            for index in range(x.shape[0]):
                for lane in range(LANES):
                    value, weight = s[_VALUES + index * LANES + lane], ws[index, lane]
                    s[_PRODUCTS + lane] += weight * value * xs[index, lane]
                    s[_SQUARES + lane] += weight * value * value
            if trial == 0:
                _start_best(s)
            else:
                _update_best(s)
        for lane in range(min(LANES, x.shape[1] - first)):
            empty = abs(s[_EXTREME + lane]) < EPSILON
            scales[first + lane] = _ZERO if empty else s[_SCALE + lane]


@jit
def descend_coordinates(x, weights, low, high, codes, scales):  # type: ignore[no-untyped-def]
    """Search as `reference.descend` does; ``codes`` are changed in place."""
    s = numpy.empty(_SCRATCH, numpy.float32)
    xs = numpy.empty((x.shape[0], LANES), numpy.float32)
    ws, cs = numpy.empty_like(xs), numpy.empty_like(xs)
    for first in range(0, x.shape[1], LANES):
        _load_panel(x, first, xs)
        _load_panel(weights, first, ws)
        _load_panel(codes, first, cs)
        for lane in range(LANES):
            s[_PRODUCTS + lane], s[_SQUARES + lane] = _ZERO, _ZERO
        for index in range(x.shape[0]):
            for lane in range(LANES):
                code, weight = cs[index, lane], ws[index, lane]
                s[_PRODUCTS + lane] += weight * xs[index, lane] * code
                s[_SQUARES + lane] += weight * code * code
        for _ in range(5):
            for lane in range(LANES):
                s[_CANDIDATE + lane] = _ZERO
            for index in range(x.shape[0]):
                for lane in range(LANES):
                    value, weight, code = xs[index, lane], ws[index, lane], cs[index, lane]
                    products, squares = s[_PRODUCTS + lane], s[_SQUARES + lane]
                    product = products - weight * value * code
                    square = squares - weight * code * code
                    possible = (product > _ZERO) & ((square > _ZERO) | (low < _ZERO))
                    new = round_and_clamp(value * square / product, low, high)
                    with_product = product + weight * value * new
                    with_square = square + weight * new * new
                    gained = with_product * with_product * squares
                    better = gained > products * products * with_square
                    better &= possible & (new != code) & (with_square > _ZERO)
                    cs[index, lane] = new if better else code
                    s[_PRODUCTS + lane] = with_product if better else products
                    s[_SQUARES + lane] = with_square if better else squares
                    s[_CANDIDATE + lane] += _ONE if better else _ZERO
            if not s[_CANDIDATE : _CANDIDATE + LANES].any():
                break
        count = min(LANES, x.shape[1] - first)
        for lane in range(count):
            products, squares = s[_PRODUCTS + lane], s[_SQUARES + lane]
            scales[first + lane] = products / squares if squares > _ZERO else _ZERO
        _store_panel(cs, first, codes)


@inner
def _find_extremes(x, s):  # type: ignore[no-untyped-def]
    """Find the element of largest magnitude of each lane, the first of several."""
    for lane in range(LANES):
        s[_EXTREME + lane] = x[0, lane]
    for index in range(1, x.shape[0]):
        for lane in range(LANES):
            value, extreme = x[index, lane], s[_EXTREME + lane]
            s[_EXTREME + lane] = value if abs(value) > abs(extreme) else extreme


@inner
def _sum_codes(x, w, s, numerator, low, high):  # type: ignore[no-untyped-def]
    """Sum products and squares of the codes that ``numerator / extreme`` gives, with weights."""
    for lane in range(LANES):
        s[_CANDIDATE + lane] = numerator / s[_EXTREME + lane]
        s[_PRODUCTS + lane], s[_SQUARES + lane] = _ZERO, _ZERO
    for first in range(0, x.shape[0], UNROLLED_COLUMNS):
        for lane in range(LANES):
            inverse, products, squares = (
                s[_CANDIDATE + lane],
                s[_PRODUCTS + lane],
                s[_SQUARES + lane],
            )
            for index in range(UNROLLED_COLUMNS):
                value, weight = x[first + index, lane], w[first + index, lane]
                code = round_and_clamp(inverse * value, low, high)
                products += weight * value * code
                squares += weight * code * code
            s[_PRODUCTS + lane], s[_SQUARES + lane] = products, squares


@inner
def _start_best(s):  # type: ignore[no-untyped-def]
    """Begin with the scale that fits the sums, 0 where nothing has weight."""
    for lane in range(LANES):
        products, squares = s[_PRODUCTS + lane], s[_SQUARES + lane]
        scale = products / squares
        scale = _ZERO if squares == _ZERO else scale
        s[_SCALE + lane], s[_BEST + lane] = scale, scale * products
        s[_INVERSE + lane] = s[_CANDIDATE + lane]


@inner
def _update_best(s):  # type: ignore[no-untyped-def]
    """Take the scale that fits the sums where it leaves less than the best so far."""
    for lane in range(LANES):
        products, squares, best = s[_PRODUCTS + lane], s[_SQUARES + lane], s[_BEST + lane]
        scale, inverse = s[_SCALE + lane], s[_INVERSE + lane]
        found = products / squares
        better = (squares > _ZERO) & (products * products > best * squares)
        s[_SCALE + lane] = found if better else scale
        s[_BEST + lane] = found * products if better else best
        s[_INVERSE + lane] = s[_CANDIDATE + lane] if better else inverse


# Grids with a minimum


@jit
def search_affine(x, weights, high, widths, absolute, scales, lowered, codes):  # type: ignore[no-untyped-def]
    """Search as `reference.affine` does; inverses: the first ``high / range``, then ``widths / (most - least)``."""
    s = numpy.empty(_AFFINE_SCRATCH, numpy.float32)
    floor = numpy.empty(LANES, numpy.float32)
    start = numpy.empty(LANES, numpy.float32)
    xs = numpy.empty((x.shape[0], LANES), numpy.float32)
    ws = numpy.empty((x.shape[0], LANES), numpy.float32)
    for first in range(0, x.shape[1], LANES):
        _load_panel(x, first, xs)
        _load_panel(weights, first, ws)
        _find_range(xs, ws, s)
        for lane in range(LANES):
            least = s[_LEAST + lane]
            floor[lane] = _ZERO if least > _ZERO else least
            s[_LEAST + lane] = floor[lane]
            s[_CANDIDATE + lane] = high / (s[_MOST + lane] - floor[lane])
            s[_FITTED + lane], s[_LOWEST + lane] = _ONE / s[_CANDIDATE + lane], floor[lane]
        _sum_errors(xs, ws, s, high, absolute)
        for lane in range(LANES):
            s[_SCALE + lane], s[_BEST + lane] = s[_FITTED + lane], s[_ERROR + lane]
            s[_INVERSE + lane], start[lane] = s[_CANDIDATE + lane], floor[lane]
        for trial in range(len(widths)):
            for lane in range(LANES):
                s[_CANDIDATE + lane] = widths[trial] / (s[_MOST + lane] - s[_LEAST + lane])
            _fit_line(xs, ws, s, high)
            _sum_errors(xs, ws, s, high, absolute)
            for lane in range(LANES):
                error = s[_ERROR + lane]
                better = (s[_SQUARES + lane] > _ZERO) & (error < s[_BEST + lane])
                s[_BEST + lane] = error if better else s[_BEST + lane]
                s[_SCALE + lane] = s[_FITTED + lane] if better else s[_SCALE + lane]
                s[_INVERSE + lane] = s[_CANDIDATE + lane] if better else s[_INVERSE + lane]
                start[lane] = s[_LEAST + lane] if better else start[lane]
                s[_LEAST + lane] = s[_LOWEST + lane] if better else s[_LEAST + lane]
        count = min(LANES, x.shape[1] - first)
        for lane in range(count):
            flat = s[_MOST + lane] <= floor[lane]
            scales[first + lane] = _ZERO if flat else s[_SCALE + lane]
            lowered[first + lane] = -floor[lane] if flat else -s[_LEAST + lane]
        for index in range(x.shape[0]):
            for lane in range(LANES):
                code = round_and_clamp(
                    s[_INVERSE + lane] * (xs[index, lane] - start[lane]), _ZERO, high
                )
                xs[index, lane] = _ZERO if s[_MOST + lane] <= floor[lane] else code
        _store_panel(xs, first, codes)


@inner
def _find_range(x, w, s):  # type: ignore[no-untyped-def]
    """Find the least and the greatest value, and sum the weights alone and times the values."""
    for lane in range(LANES):
        s[_LEAST + lane], s[_MOST + lane] = x[0, lane], x[0, lane]
        s[_WEIGHT + lane], s[_MEAN + lane] = w[0, lane], w[0, lane] * x[0, lane]
    for index in range(1, x.shape[0]):
        for lane in range(LANES):
            value, weight = x[index, lane], w[index, lane]
            least, most = s[_LEAST + lane], s[_MOST + lane]
            s[_LEAST + lane] = value if value < least else least
            s[_MOST + lane] = value if value > most else most
            s[_WEIGHT + lane] += weight
            s[_MEAN + lane] += weight * value


@inner
def _fit_line(x, w, s, high):  # type: ignore[no-untyped-def]
    """Fit scale and minimum to the codes of the candidate."""
    for lane in range(LANES):
        s[_ONES + lane], s[_SQUARES + lane], s[_PRODUCTS + lane] = _ZERO, _ZERO, _ZERO
    for first in range(0, x.shape[0], UNROLLED_COLUMNS):
        for lane in range(LANES):
            inverse, least = s[_CANDIDATE + lane], s[_LEAST + lane]
            ones, squares, products = s[_ONES + lane], s[_SQUARES + lane], s[_PRODUCTS + lane]
            for index in range(UNROLLED_COLUMNS):
                value, weight = x[first + index, lane], w[first + index, lane]
                code = round_and_clamp(inverse * (value - least), _ZERO, high)
                ones += weight * code
                squares += weight * code * code
                products += weight * code * value
            s[_ONES + lane], s[_SQUARES + lane], s[_PRODUCTS + lane] = ones, squares, products
    for lane in range(LANES):
        ones, squares, products = s[_ONES + lane], s[_SQUARES + lane], s[_PRODUCTS + lane]
        weight, mean = s[_WEIGHT + lane], s[_MEAN + lane]
        determinant = weight * squares - ones * ones
        fitted = (weight * products - mean * ones) / determinant
        lowest = (squares * mean - ones * products) / determinant
        above = lowest > _ZERO
        s[_FITTED + lane] = products / squares if above else fitted
        s[_LOWEST + lane] = _ZERO if above else lowest
        s[_SQUARES + lane] = determinant


@inner
def _sum_errors(x, w, s, high, absolute):  # type: ignore[no-untyped-def]
    """Sum weighted errors of the candidate's scale and minimum: magnitudes with ``absolute``, else squares."""
    for lane in range(LANES):
        s[_ERROR + lane] = _ZERO
    for first in range(0, x.shape[0], UNROLLED_COLUMNS):
        for lane in range(LANES):
            inverse, least, error = s[_CANDIDATE + lane], s[_LEAST + lane], s[_ERROR + lane]
            fitted, lowest = s[_FITTED + lane], s[_LOWEST + lane]
            for index in range(UNROLLED_COLUMNS):
                value, weight = x[first + index, lane], w[first + index, lane]
                code = round_and_clamp(inverse * (value - least), _ZERO, high)
                difference = fitted * code + lowest - value
                other = abs(difference) if absolute else difference * difference
                error += weight * other
            s[_ERROR + lane] = error


# Panels of groups


@inner
def _load_panel(array, first, panel):  # type: ignore[no-untyped-def]
    """Fill ``panel`` ``[size, LANES]`` with the groups from ``first`` on, and with zeros after the last."""
    count = min(LANES, array.shape[1] - first)
    for index in range(array.shape[0]):
        row, out = array[index, first : first + count], panel[index]
        for lane in range(count):
            out[lane] = row[lane]
        for lane in range(count, LANES):
            out[lane] = _ZERO


@inner
def _store_panel(panel, first, array):  # type: ignore[no-untyped-def]
    """Undo `_load_panel`."""
    count = min(LANES, array.shape[1] - first)
    for index in range(array.shape[0]):
        row, out = panel[index], array[index, first : first + count]
        for lane in range(count):
            out[lane] = row[lane]
