"""ggml's searches for the scale of one group, in loops compiled by numba: equal to ggml's to the last bit.

`reference` says which function of ggml each loop corresponds to. Arrays are ``[size, groups]``. Sixty-four groups are
computed side by side: then 64 sums, each in the order of its elements, become vector instructions, which is impossible
for ggml's own loop over one group. All intermediate results are in one scratch array with fixed positions
(`_EXTREME`, `_WEIGHTED_CODES`, ...), so that the compiler knows that they do not overlap.
"""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import internal_jit, jit
from quantforge.packers.ggml.grid import LANES
from quantforge.packers.ggml.row_loops import look_up, round_and_clamp
from quantforge.packers.ggml.search_loops import UNROLLED_COLUMNS

EPSILON = numpy.float32(1e-15)  # groups with smaller magnitudes are treated as zeros
_ZERO, _ONE = numpy.float32(0), numpy.float32(1)
# Positions in the scratch array of all searches.
_PRODUCTS, _SQUARES, _SCALE, _BEST_GAIN, _INVERSE, _CANDIDATE = (
    place * LANES for place in range(6)
)
# Symmetric grids.
_EXTREME = 6 * LANES
_RATIOS = 7 * LANES  # of a group whose type has a table: 32 rows, and as many for its values
_VALUES = _RATIOS + 32 * LANES
_SCRATCH = _VALUES + 32 * LANES
# Grids with a minimum.
_WEIGHTED_CODES, _MIN, _MAX, _WEIGHT = (place * LANES for place in range(6, 10))
_MEAN, _ERROR, _FITTED_SCALE, _FITTED_MIN = (place * LANES for place in range(10, 14))
_AFFINE_SCRATCH = 14 * LANES


@jit
def mean_squares(rows, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` with the mean square of each row; see `reference._mean_squares`."""
    for row in range(rows.shape[0]):
        total = _ZERO
        for value in rows[row]:
            total += value * value
        out[row] = total / numpy.float32(rows.shape[1])


@jit
def signed_extreme(x, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` with the element of largest magnitude of each group; see `reference._signed_extreme`."""
    s = numpy.empty(_SCRATCH, numpy.float32)
    xs = numpy.empty((x.shape[0], LANES), numpy.float32)
    for first in range(0, x.shape[1], LANES):
        _load_panel(x, first, xs)
        _find_extremes(xs, s)
        for lane in range(min(LANES, x.shape[1] - first)):
            out[first + lane] = s[_EXTREME + lane]


# Symmetric grids


@jit
def search_symmetric(x, weights, high, numerators, scales, codes):  # type: ignore[no-untyped-def]
    """Search a symmetric scale; see `reference._search_symmetric`. It starts with the first of ``numerators``."""
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
def search_table_scale(x, weights, ratios, low, thresholds, increments, scales):  # type: ignore[no-untyped-def]
    """Search the scale for a table; see `reference._search_table_scale`. Inverse scales are ``ratios / extreme``."""
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
            look_up(s, _RATIOS, _VALUES, x.shape[0] * LANES, low, thresholds, increments)
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
    """Improve ``codes`` in place by coordinate descent; see `reference._descend_coordinates`."""
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
                    other_products = products - weight * value * code
                    other_squares = squares - weight * code * code
                    is_valid = (other_products > _ZERO) & ((other_squares > _ZERO) | (low < _ZERO))
                    new_code = round_and_clamp(value * other_squares / other_products, low, high)
                    new_product = other_products + weight * value * new_code
                    new_square = other_squares + weight * new_code * new_code
                    candidate_gain = new_product * new_product * squares
                    is_better = candidate_gain > products * products * new_square
                    is_better &= is_valid & (new_code != code) & (new_square > _ZERO)
                    cs[index, lane] = new_code if is_better else code
                    s[_PRODUCTS + lane] = new_product if is_better else products
                    s[_SQUARES + lane] = new_square if is_better else squares
                    s[_CANDIDATE + lane] += _ONE if is_better else _ZERO
            if not s[_CANDIDATE : _CANDIDATE + LANES].any():
                break
        count = min(LANES, x.shape[1] - first)
        for lane in range(count):
            products, squares = s[_PRODUCTS + lane], s[_SQUARES + lane]
            scales[first + lane] = products / squares if squares > _ZERO else _ZERO
        _store_panel(cs, first, codes)


@internal_jit
def _find_extremes(x, s):  # type: ignore[no-untyped-def]
    """Find the element of largest magnitude of each group, the first of several."""
    for lane in range(LANES):
        s[_EXTREME + lane] = x[0, lane]
    for index in range(1, x.shape[0]):
        for lane in range(LANES):
            value, extreme = x[index, lane], s[_EXTREME + lane]
            s[_EXTREME + lane] = value if abs(value) > abs(extreme) else extreme


@internal_jit
def _sum_codes(x, w, s, numerator, low, high):  # type: ignore[no-untyped-def]
    """Sum the weighted products and squares of the codes for the inverse scale ``numerator / extreme``."""
    for lane in range(LANES):
        s[_CANDIDATE + lane] = numerator / s[_EXTREME + lane]
        s[_PRODUCTS + lane], s[_SQUARES + lane] = _ZERO, _ZERO
    for first in range(0, x.shape[0], UNROLLED_COLUMNS):
        for lane in range(LANES):
            inverse = s[_CANDIDATE + lane]
            products = s[_PRODUCTS + lane]
            squares = s[_SQUARES + lane]
            for index in range(UNROLLED_COLUMNS):
                value, weight = x[first + index, lane], w[first + index, lane]
                code = round_and_clamp(inverse * value, low, high)
                products += weight * value * code
                squares += weight * code * code
            s[_PRODUCTS + lane], s[_SQUARES + lane] = products, squares


@internal_jit
def _start_best(s):  # type: ignore[no-untyped-def]
    """Start with the scale that fits the sums, or 0 if all weights are 0."""
    for lane in range(LANES):
        products, squares = s[_PRODUCTS + lane], s[_SQUARES + lane]
        scale = products / squares
        scale = _ZERO if squares == _ZERO else scale
        s[_SCALE + lane], s[_BEST_GAIN + lane] = scale, scale * products
        s[_INVERSE + lane] = s[_CANDIDATE + lane]


@internal_jit
def _update_best(s):  # type: ignore[no-untyped-def]
    """Take the scale that fits the sums if its error is smaller than the best so far."""
    for lane in range(LANES):
        products, squares, best = s[_PRODUCTS + lane], s[_SQUARES + lane], s[_BEST_GAIN + lane]
        scale, inverse = s[_SCALE + lane], s[_INVERSE + lane]
        candidate = products / squares
        is_better = (squares > _ZERO) & (products * products > best * squares)
        s[_SCALE + lane] = candidate if is_better else scale
        s[_BEST_GAIN + lane] = candidate * products if is_better else best
        s[_INVERSE + lane] = s[_CANDIDATE + lane] if is_better else inverse


# Grids with a minimum


@jit
def search_affine(x, weights, high, numerators, absolute, scales, negated_mins, codes):  # type: ignore[no-untyped-def]
    """Search scale and minimum; see `reference._search_affine`.

    The first inverse scale is ``high / (max - min)``, the others are ``numerators / (max - min)``.
    """
    s = numpy.empty(_AFFINE_SCRATCH, numpy.float32)
    initial_min = numpy.empty(LANES, numpy.float32)
    code_min = numpy.empty(LANES, numpy.float32)
    xs = numpy.empty((x.shape[0], LANES), numpy.float32)
    ws = numpy.empty((x.shape[0], LANES), numpy.float32)
    for first in range(0, x.shape[1], LANES):
        _load_panel(x, first, xs)
        _load_panel(weights, first, ws)
        _find_range(xs, ws, s)
        for lane in range(LANES):
            min_value = s[_MIN + lane]
            initial_min[lane] = _ZERO if min_value > _ZERO else min_value
            s[_MIN + lane] = initial_min[lane]
            s[_CANDIDATE + lane] = high / (s[_MAX + lane] - initial_min[lane])
            s[_FITTED_SCALE + lane], s[_FITTED_MIN + lane] = (
                _ONE / s[_CANDIDATE + lane],
                initial_min[lane],
            )
        _sum_errors(xs, ws, s, high, absolute)
        for lane in range(LANES):
            s[_SCALE + lane], s[_BEST_GAIN + lane] = s[_FITTED_SCALE + lane], s[_ERROR + lane]
            s[_INVERSE + lane], code_min[lane] = s[_CANDIDATE + lane], initial_min[lane]
        for trial in range(len(numerators)):
            for lane in range(LANES):
                s[_CANDIDATE + lane] = numerators[trial] / (s[_MAX + lane] - s[_MIN + lane])
            _fit_line(xs, ws, s, high)
            _sum_errors(xs, ws, s, high, absolute)
            for lane in range(LANES):
                error = s[_ERROR + lane]
                is_better = (s[_SQUARES + lane] > _ZERO) & (error < s[_BEST_GAIN + lane])
                s[_BEST_GAIN + lane] = error if is_better else s[_BEST_GAIN + lane]
                s[_SCALE + lane] = s[_FITTED_SCALE + lane] if is_better else s[_SCALE + lane]
                s[_INVERSE + lane] = s[_CANDIDATE + lane] if is_better else s[_INVERSE + lane]
                code_min[lane] = s[_MIN + lane] if is_better else code_min[lane]
                s[_MIN + lane] = s[_FITTED_MIN + lane] if is_better else s[_MIN + lane]
        count = min(LANES, x.shape[1] - first)
        for lane in range(count):
            is_empty = s[_MAX + lane] <= initial_min[lane]
            scales[first + lane] = _ZERO if is_empty else s[_SCALE + lane]
            negated_mins[first + lane] = -initial_min[lane] if is_empty else -s[_MIN + lane]
        for index in range(x.shape[0]):
            for lane in range(LANES):
                code = round_and_clamp(
                    s[_INVERSE + lane] * (xs[index, lane] - code_min[lane]), _ZERO, high
                )
                xs[index, lane] = _ZERO if s[_MAX + lane] <= initial_min[lane] else code
        _store_panel(xs, first, codes)


@internal_jit
def _find_range(x, w, s):  # type: ignore[no-untyped-def]
    """Find the smallest and the largest value, and sum the weights and the weighted values."""
    for lane in range(LANES):
        s[_MIN + lane], s[_MAX + lane] = x[0, lane], x[0, lane]
        s[_WEIGHT + lane], s[_MEAN + lane] = w[0, lane], w[0, lane] * x[0, lane]
    for index in range(1, x.shape[0]):
        for lane in range(LANES):
            value, weight = x[index, lane], w[index, lane]
            min_value, max_value = s[_MIN + lane], s[_MAX + lane]
            s[_MIN + lane] = value if value < min_value else min_value
            s[_MAX + lane] = value if value > max_value else max_value
            s[_WEIGHT + lane] += weight
            s[_MEAN + lane] += weight * value


@internal_jit
def _fit_line(x, w, s, high):  # type: ignore[no-untyped-def]
    """Fit scale and minimum to the codes of the candidate."""
    for lane in range(LANES):
        s[_WEIGHTED_CODES + lane], s[_SQUARES + lane], s[_PRODUCTS + lane] = _ZERO, _ZERO, _ZERO
    for first in range(0, x.shape[0], UNROLLED_COLUMNS):
        for lane in range(LANES):
            inverse, min_value = s[_CANDIDATE + lane], s[_MIN + lane]
            weighted_codes = s[_WEIGHTED_CODES + lane]
            squares = s[_SQUARES + lane]
            products = s[_PRODUCTS + lane]
            for index in range(UNROLLED_COLUMNS):
                value, weight = x[first + index, lane], w[first + index, lane]
                code = round_and_clamp(inverse * (value - min_value), _ZERO, high)
                weighted_codes += weight * code
                squares += weight * code * code
                products += weight * code * value
            s[_WEIGHTED_CODES + lane], s[_SQUARES + lane], s[_PRODUCTS + lane] = (
                weighted_codes,
                squares,
                products,
            )
    for lane in range(LANES):
        weighted_codes = s[_WEIGHTED_CODES + lane]
        squares = s[_SQUARES + lane]
        products = s[_PRODUCTS + lane]
        weight, mean = s[_WEIGHT + lane], s[_MEAN + lane]
        determinant = weight * squares - weighted_codes * weighted_codes
        fitted_scale = (weight * products - mean * weighted_codes) / determinant
        lowest = (squares * mean - weighted_codes * products) / determinant
        clamp_min = lowest > _ZERO
        s[_FITTED_SCALE + lane] = products / squares if clamp_min else fitted_scale
        s[_FITTED_MIN + lane] = _ZERO if clamp_min else lowest
        s[_SQUARES + lane] = determinant


@internal_jit
def _sum_errors(x, w, s, high, absolute):  # type: ignore[no-untyped-def]
    """Sum the weighted errors of the candidate's scale and minimum: magnitudes with ``absolute``, else squares."""
    for lane in range(LANES):
        s[_ERROR + lane] = _ZERO
    for first in range(0, x.shape[0], UNROLLED_COLUMNS):
        for lane in range(LANES):
            inverse, min_value, error = s[_CANDIDATE + lane], s[_MIN + lane], s[_ERROR + lane]
            scale, minimum = s[_FITTED_SCALE + lane], s[_FITTED_MIN + lane]
            for index in range(UNROLLED_COLUMNS):
                value, weight = x[first + index, lane], w[first + index, lane]
                code = round_and_clamp(inverse * (value - min_value), _ZERO, high)
                difference = scale * code + minimum - value
                error_term = abs(difference) if absolute else difference * difference
                error += weight * error_term
            s[_ERROR + lane] = error


# Panels of groups


@internal_jit
def _load_panel(array, first, panel):  # type: ignore[no-untyped-def]
    """Copy the 64 groups from index ``first`` into ``panel`` ``[size, LANES]``; missing groups become zeros."""
    count = min(LANES, array.shape[1] - first)
    for index in range(array.shape[0]):
        row, out = array[index, first : first + count], panel[index]
        for lane in range(count):
            out[lane] = row[lane]
        for lane in range(count, LANES):
            out[lane] = _ZERO


@internal_jit
def _store_panel(panel, first, array):  # type: ignore[no-untyped-def]
    """Copy ``panel`` back to ``array``; the inverse of `_load_panel`."""
    count = min(LANES, array.shape[1] - first)
    for index in range(array.shape[0]):
        row, out = panel[index], array[index, first : first + count]
        for lane in range(count):
            out[lane] = row[lane]
