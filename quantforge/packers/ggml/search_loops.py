"""Loops of `search`, compiled by numba, each at its first call in a process.

Sixty-four rows (a panel) are computed side by side. A group is then a run of columns of ``[columns, 64]``, and a sum
over it is 64 sums in the order of the columns. All of it becomes vector instructions without reordering a sum, which
would make results depend on the processor. All intermediate results are in one scratch array with fixed positions
(`_STEP`, ...), so that the compiler knows that they do not overlap.
"""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import internal_jit, jit
from quantforge.packers.ggml.grid import LANES
from quantforge.packers.ggml.row_loops import CACHE_LINE_FLOATS, look_up, round_and_clamp

UNROLLED_COLUMNS = 4  # columns summed in registers before the sums are stored
_ZERO = numpy.float32(0)
_ONE, _TWO = numpy.float32(1), numpy.float32(2)
_INFINITY = numpy.float32(numpy.inf)
# As `search.MIN_VARIANCE_SHARE`.
_MIN_VARIANCE_SHARE = numpy.float32(1e-5)
# Positions in the scratch array.
_STEP, _OFFSET, _INVERSE = 0, LANES, 2 * LANES  # of the candidate
_ERROR, _SQUARES, _WEIGHTED_CODES, _PRODUCTS, _RESIDUAL = (place * LANES for place in range(3, 8))
_LOW, _HIGH, _EXTREME, _WEIGHT = (place * LANES for place in range(8, 12))  # of the group
_BEST = 12 * LANES  # seven rows: the smallest error, and the results that belong to it
_RATIOS = 19 * LANES  # of a group whose type has a table: 32 rows, and as many for its values
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
        rows_in_panel = min(LANES, rows.shape[0] - panel * LANES)
        for first in range(0, x.shape[1], CACHE_LINE_FLOATS):
            for lane in range(rows_in_panel):
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
            column_weight = importance[column]
            for lane in range(LANES):
                value = x[panel, column, lane]
                weights[panel, column, lane] = column_weight * numpy.sqrt(
                    value * value + mean[lane]
                )


@jit
def fit_groups(  # type: ignore[no-untyped-def]
    x, w, starts, refine_rounds, affine, nonpositive_offset, low, high, thresholds, increments, out
):
    """Fill ``out`` with step and offset of each group; see `search.fit_groups`."""
    s = numpy.empty(_SCRATCH, numpy.float32)
    size = x.shape[1] // out.shape[2]
    for panel in range(x.shape[0]):
        for group in range(out.shape[2]):
            columns = slice(group * size, group * size + size)
            xs, ws = x[panel, columns], w[panel, columns]
            _describe_group(xs, ws, s)
            for lane in range(LANES):
                group_min = s[_LOW + lane]
                group_min = _ZERO if nonpositive_offset and group_min > _ZERO else group_min
                s[_LOW + lane] = group_min
                s[_BEST + lane], s[_BEST + LANES + lane] = _INFINITY, _ZERO
                s[_BEST + 2 * LANES + lane] = group_min if affine else _ZERO
                s[_BEST + 3 * LANES + lane] = _ZERO
            for trial in range(len(starts) + refine_rounds):
                if trial < len(starts):
                    _start_candidate(s, starts[trial, 0], starts[trial, 1], affine, high)
                else:
                    for lane in range(LANES):
                        s[_STEP + lane] = s[_BEST + LANES + lane]
                        s[_OFFSET + lane] = s[_BEST + 2 * LANES + lane]
                _measure_candidate(xs, ws, s, low, high, thresholds, increments)
                _improve_best(s, affine, nonpositive_offset)
            for lane in range(LANES):
                s[_BEST + 4 * LANES + lane] = s[_WEIGHT + lane]
            for row in range(4):
                for lane in range(LANES):
                    out[row, panel, group, lane] = s[_BEST + (row + 1) * LANES + lane]


@jit
def choose_integers(x, w, start, units, moves, low, high, thresholds, increments, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` with the best integers of each group; see `search.choose_integers`.

    The first row of ``moves`` holds the smallest and the largest integer.
    """
    s = numpy.empty(_SCRATCH, numpy.float32)
    groups = start.shape[2]
    size, groups_per_block = x.shape[1] // groups, groups // units.shape[2]
    smallest, largest = moves[0, 0], moves[0, 1]
    for panel in range(x.shape[0]):
        for group in range(groups):
            columns = slice(group * size, group * size + size)
            xs, ws = x[panel, columns], w[panel, columns]
            for lane in range(LANES):
                s[_BEST + lane] = _INFINITY
            for move in range(1, len(moves)):
                for lane in range(LANES):
                    d = units[0, panel, group // groups_per_block, lane]
                    dmin = units[1, panel, group // groups_per_block, lane]
                    ratio = start[0, panel, group, lane] / (_ONE if d == _ZERO else d)
                    scale = round_and_clamp(
                        round_and_clamp(ratio, smallest, largest) + moves[move, 0],
                        smallest,
                        largest,
                    )
                    ratio = -start[1, panel, group, lane] / (_ONE if dmin == _ZERO else dmin)
                    minimum = round_and_clamp(
                        round_and_clamp(ratio, smallest, largest) + moves[move, 1],
                        smallest,
                        largest,
                    )
                    s[_LOW + lane], s[_HIGH + lane] = scale, minimum
                    s[_STEP + lane], s[_OFFSET + lane] = d * scale, -(dmin * minimum)
                _measure_candidate(xs, ws, s, low, high, thresholds, increments)
                for lane in range(LANES):
                    is_better = s[_ERROR + lane] < s[_BEST + lane]
                    for row in range(5):
                        slot = _BEST + row * LANES + lane
                        s[slot] = s[_ERROR + row * LANES + lane] if is_better else s[slot]
                    scale_slot, min_slot = _BEST + 5 * LANES + lane, _BEST + 6 * LANES + lane
                    s[scale_slot] = s[_LOW + lane] if is_better else s[scale_slot]
                    s[min_slot] = s[_HIGH + lane] if is_better else s[min_slot]
            for row in range(7):
                for lane in range(LANES):
                    out[row, panel, group, lane] = s[_BEST + row * LANES + lane]


@internal_jit
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


@internal_jit
def _start_candidate(s, low_share, high_share, affine, high):  # type: ignore[no-untyped-def]
    """Set step and offset of a candidate from one of `Candidates.starts`."""
    for lane in range(LANES):
        if affine:
            smallest, width = s[_LOW + lane], s[_HIGH + lane] - s[_LOW + lane]
            s[_OFFSET + lane] = smallest + width * low_share
            s[_STEP + lane] = width * (_ONE - low_share - high_share) / high
        else:
            s[_OFFSET + lane] = _ZERO
            s[_STEP + lane] = s[_EXTREME + lane] / low_share


@internal_jit
def _measure_candidate(x, w, s, low, high, thresholds, increments):  # type: ignore[no-untyped-def]
    """Compute the sums over one group ``x``, ``w`` ``[size, LANES]`` for the candidate in the scratch array."""
    for lane in range(LANES):
        step = s[_STEP + lane]
        s[_INVERSE + lane] = _ZERO if step == _ZERO else _ONE / step
        s[_ERROR + lane] = _ZERO
        s[_SQUARES + lane] = _ZERO
        s[_WEIGHTED_CODES + lane] = _ZERO
        s[_PRODUCTS + lane] = _ZERO
        s[_RESIDUAL + lane] = _ZERO
    if thresholds is not None:
        for index in range(x.shape[0]):
            for lane in range(LANES):
                ratio = (x[index, lane] - s[_OFFSET + lane]) * s[_INVERSE + lane]
                s[_RATIOS + index * LANES + lane] = ratio
        look_up(s, _RATIOS, _VALUES, x.shape[0] * LANES, low, thresholds, increments)
        for index in range(x.shape[0]):
            for lane in range(LANES):
                value, weight = s[_VALUES + index * LANES + lane], w[index, lane]
                residual = x[index, lane] - s[_OFFSET + lane] - s[_STEP + lane] * value
                weighted_value, weighted_residual = weight * value, weight * residual
                s[_ERROR + lane] += weighted_residual * residual
                s[_SQUARES + lane] += weighted_value * value
                s[_WEIGHTED_CODES + lane] += weighted_value
                s[_PRODUCTS + lane] += weighted_residual * value
                s[_RESIDUAL + lane] += weighted_residual
        return
    for first in range(0, x.shape[0], UNROLLED_COLUMNS):
        for lane in range(LANES):
            step, offset, inverse = s[_STEP + lane], s[_OFFSET + lane], s[_INVERSE + lane]
            error = s[_ERROR + lane]
            squares = s[_SQUARES + lane]
            weighted_codes = s[_WEIGHTED_CODES + lane]
            products, residual_sum = s[_PRODUCTS + lane], s[_RESIDUAL + lane]
            for index in range(UNROLLED_COLUMNS):
                centered, weight = x[first + index, lane] - offset, w[first + index, lane]
                value = round_and_clamp(centered * inverse, low, high)
                residual = centered - step * value
                weighted_value, weighted_residual = weight * value, weight * residual
                error += weighted_residual * residual
                squares += weighted_value * value
                weighted_codes += weighted_value
                products += weighted_residual * value
                residual_sum += weighted_residual
            s[_ERROR + lane], s[_SQUARES + lane], s[_WEIGHTED_CODES + lane] = (
                error,
                squares,
                weighted_codes,
            )
            s[_PRODUCTS + lane], s[_RESIDUAL + lane] = products, residual_sum


@internal_jit
def _improve_best(s, affine, nonpositive_offset):  # type: ignore[no-untyped-def]
    """Fit step and offset to the codes of the candidate; keep them where the error is smaller."""
    for lane in range(LANES):
        step, offset = s[_STEP + lane], s[_OFFSET + lane]
        error, squares, products = s[_ERROR + lane], s[_SQUARES + lane], s[_PRODUCTS + lane]
        weighted_codes = s[_WEIGHTED_CODES + lane]
        residual_sum = s[_RESIDUAL + lane]
        group_weight = s[_WEIGHT + lane]
        if affine:
            variance = squares - weighted_codes * weighted_codes / group_weight
            covariance = products - weighted_codes * residual_sum / group_weight
            step_change = covariance / variance
            offset_change = (residual_sum - step_change * weighted_codes) / group_weight
            error_decrease = covariance * step_change + residual_sum * residual_sum / group_weight
            is_constant = not variance > _MIN_VARIANCE_SHARE * squares
            clamp_offset = nonpositive_offset and (is_constant or offset + offset_change > _ZERO)
            product_at_zero = products + offset * weighted_codes
            step_change = product_at_zero / squares if clamp_offset else step_change
            offset_change = -offset if clamp_offset else offset_change
            clamped_decrease = (
                product_at_zero * step_change
                - _TWO * offset * residual_sum
                - offset * offset * group_weight
            )
            error_decrease = clamped_decrease if clamp_offset else error_decrease
            is_valid = (clamp_offset or not is_constant) and step + step_change > _ZERO
        else:
            step_change, offset_change = products / squares, _ZERO
            error_decrease = products * step_change
            is_valid = squares > _ZERO
        error -= error_decrease
        is_better = is_valid & (error < s[_BEST + lane])
        s[_BEST + lane] = error if is_better else s[_BEST + lane]
        step_slot, offset_slot = _BEST + LANES + lane, _BEST + 2 * LANES + lane
        squares_slot = _BEST + 3 * LANES + lane
        s[step_slot] = step + step_change if is_better else s[step_slot]
        s[offset_slot] = offset + offset_change if is_better else s[offset_slot]
        s[squares_slot] = squares if is_better else s[squares_slot]
