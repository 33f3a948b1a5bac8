"""Loops of `ggml_search` for grids around 0, compiled by numba: its slow parts, equal to ggml's to the last bit.

Arrays are ``[size, groups]``. Sixty-four groups are computed side by side: then 64 sums, each in the order of its
elements, are vector instructions. ggml's own loops over one group cannot be that. Numbers of a group that change are in
one array with fixed places (`_EXTREME` ...), because the compiler then knows that they do not overlap.
"""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import inner, jit
from quantforge.packers.ggml.panel_loops import TOGETHER, look_up, rounded
from quantforge.packers.ggml.panels import LANES

EPSILON = numpy.float32(1e-15)  # a group below it is empty
_ZERO, _ONE = numpy.float32(0), numpy.float32(1)
# Places in the scratch.
_EXTREME, _PRODUCTS, _SQUARES, _SCALE = (place * LANES for place in range(4))
_BEST, _INVERSE, _TRIED = (place * LANES for place in range(4, 7))
_RATIOS = 7 * LANES  # of a group with a table, 32 places, and as many for its values
_VALUES = _RATIOS + 32 * LANES
_SCRATCH = _VALUES + 32 * LANES


@jit
def mean_squares(rows, found):  # type: ignore[no-untyped-def]
    """Fill ``found`` with the result of `ggml_search.mean_squares`."""
    for row in range(rows.shape[0]):
        total = _ZERO
        for value in rows[row]:
            total += value * value
        found[row] = total / numpy.float32(rows.shape[1])


@inner
def load(array, first, panel):  # type: ignore[no-untyped-def]
    """Fill ``panel`` ``[size, LANES]`` with the groups from ``first`` on, and with zeros after the last."""
    count = min(LANES, array.shape[1] - first)
    for index in range(array.shape[0]):
        row, out = array[index, first : first + count], panel[index]
        for lane in range(count):
            out[lane] = row[lane]
        for lane in range(count, LANES):
            out[lane] = _ZERO


@inner
def store(panel, first, array):  # type: ignore[no-untyped-def]
    """Undo `load`."""
    count = min(LANES, array.shape[1] - first)
    for index in range(array.shape[0]):
        row, out = panel[index], array[index, first : first + count]
        for lane in range(count):
            out[lane] = row[lane]


@inner
def extremes(x, s):  # type: ignore[no-untyped-def]
    """Find the element of largest magnitude of each lane, the first of several."""
    for lane in range(LANES):
        s[_EXTREME + lane] = x[0, lane]
    for index in range(1, x.shape[0]):
        for lane in range(LANES):
            value, extreme = x[index, lane], s[_EXTREME + lane]
            s[_EXTREME + lane] = value if abs(value) > abs(extreme) else extreme


@inner
def sums(x, w, s, numerator, low, high):  # type: ignore[no-untyped-def]
    """Sum products and squares of the codes that ``numerator / extreme`` gives, with weights."""
    for lane in range(LANES):
        s[_TRIED + lane] = numerator / s[_EXTREME + lane]
        s[_PRODUCTS + lane], s[_SQUARES + lane] = _ZERO, _ZERO
    for first in range(0, x.shape[0], TOGETHER):
        for lane in range(LANES):
            inverse, products, squares = s[_TRIED + lane], s[_PRODUCTS + lane], s[_SQUARES + lane]
            for index in range(TOGETHER):
                value, weight = x[first + index, lane], w[first + index, lane]
                code = rounded(inverse * value, low, high)
                products += weight * value * code
                squares += weight * code * code
            s[_PRODUCTS + lane], s[_SQUARES + lane] = products, squares


@inner
def take(s):  # type: ignore[no-untyped-def]
    """Begin with the scale that fits the sums, 0 where nothing has weight."""
    for lane in range(LANES):
        products, squares = s[_PRODUCTS + lane], s[_SQUARES + lane]
        scale = products / squares
        scale = _ZERO if squares == _ZERO else scale
        s[_SCALE + lane], s[_BEST + lane] = scale, scale * products
        s[_INVERSE + lane] = s[_TRIED + lane]


@inner
def keep(s):  # type: ignore[no-untyped-def]
    """Take the scale that fits the sums where it leaves less than the best so far."""
    for lane in range(LANES):
        products, squares, best = s[_PRODUCTS + lane], s[_SQUARES + lane], s[_BEST + lane]
        scale, inverse = s[_SCALE + lane], s[_INVERSE + lane]
        found = products / squares
        better = (squares > _ZERO) & (products * products > best * squares)
        s[_SCALE + lane] = found if better else scale
        s[_BEST + lane] = found * products if better else best
        s[_INVERSE + lane] = s[_TRIED + lane] if better else inverse


@jit
def signed_extreme(x, found):  # type: ignore[no-untyped-def]
    """Fill ``found`` with the result of `ggml_search.signed_extreme`."""
    s = numpy.empty(_SCRATCH, numpy.float32)
    xs = numpy.empty((x.shape[0], LANES), numpy.float32)
    for first in range(0, x.shape[1], LANES):
        load(x, first, xs)
        extremes(xs, s)
        for lane in range(min(LANES, x.shape[1] - first)):
            found[first + lane] = s[_EXTREME + lane]


@jit
def symmetric(x, weights, high, numerators, scales, codes):  # type: ignore[no-untyped-def]
    """Search as `ggml_search.symmetric` does; the first of the ``numerators`` is taken whatever error it leaves."""
    s = numpy.empty(_SCRATCH, numpy.float32)
    xs = numpy.empty((x.shape[0], LANES), numpy.float32)
    ws = numpy.empty((x.shape[0], LANES), numpy.float32)
    low, top = -high, high - _ONE
    for first in range(0, x.shape[1], LANES):
        load(x, first, xs)
        load(weights, first, ws)
        extremes(xs, s)
        for trial in range(len(numerators)):
            sums(xs, ws, s, -numerators[trial], low, top)
            if trial == 0:
                take(s)
            else:
                keep(s)
        count = min(LANES, x.shape[1] - first)
        for lane in range(count):
            empty = abs(s[_EXTREME + lane]) < EPSILON
            scales[first + lane] = _ZERO if empty else s[_SCALE + lane]
        for index in range(x.shape[0]):
            for lane in range(LANES):
                code = rounded(s[_INVERSE + lane] * xs[index, lane], low, top)
                xs[index, lane] = low if abs(s[_EXTREME + lane]) < EPSILON else code
        store(xs, first, codes)


@jit
def from_table(x, weights, ratios, low, middles, rises, scales):  # type: ignore[no-untyped-def]
    """Search as `ggml_search.from_table` does; inverses are ``ratios / extreme``."""
    s = numpy.empty(_SCRATCH, numpy.float32)
    xs = numpy.empty((x.shape[0], LANES), numpy.float32)
    ws = numpy.empty((x.shape[0], LANES), numpy.float32)
    for first in range(0, x.shape[1], LANES):
        load(x, first, xs)
        load(weights, first, ws)
        extremes(xs, s)
        for trial in range(len(ratios)):
            for lane in range(LANES):
                extreme = s[_EXTREME + lane]
                inverse = ratios[trial] / extreme
                s[_TRIED + lane] = _ONE / (-extreme / low) if trial == 0 else inverse
                s[_PRODUCTS + lane], s[_SQUARES + lane] = _ZERO, _ZERO
            for index in range(x.shape[0]):
                for lane in range(LANES):
                    s[_RATIOS + index * LANES + lane] = s[_TRIED + lane] * xs[index, lane]
            look_up(s, _RATIOS, _VALUES, x.shape[0] * LANES, low, middles, rises)
            for index in range(x.shape[0]):
                for lane in range(LANES):
                    value, weight = s[_VALUES + index * LANES + lane], ws[index, lane]
                    s[_PRODUCTS + lane] += weight * value * xs[index, lane]
                    s[_SQUARES + lane] += weight * value * value
            if trial == 0:
                take(s)
            else:
                keep(s)
        for lane in range(min(LANES, x.shape[1] - first)):
            empty = abs(s[_EXTREME + lane]) < EPSILON
            scales[first + lane] = _ZERO if empty else s[_SCALE + lane]


@jit
def descend(x, weights, low, high, codes, scales):  # type: ignore[no-untyped-def]
    """Search as `ggml_search.descend` does; ``codes`` are changed in place."""
    s = numpy.empty(_SCRATCH, numpy.float32)
    xs = numpy.empty((x.shape[0], LANES), numpy.float32)
    ws, cs = numpy.empty_like(xs), numpy.empty_like(xs)
    for first in range(0, x.shape[1], LANES):
        load(x, first, xs)
        load(weights, first, ws)
        load(codes, first, cs)
        for lane in range(LANES):
            s[_PRODUCTS + lane], s[_SQUARES + lane] = _ZERO, _ZERO
        for index in range(x.shape[0]):
            for lane in range(LANES):
                code, weight = cs[index, lane], ws[index, lane]
                s[_PRODUCTS + lane] += weight * xs[index, lane] * code
                s[_SQUARES + lane] += weight * code * code
        for _ in range(5):
            for lane in range(LANES):
                s[_TRIED + lane] = _ZERO
            for index in range(x.shape[0]):
                for lane in range(LANES):
                    value, weight, code = xs[index, lane], ws[index, lane], cs[index, lane]
                    products, squares = s[_PRODUCTS + lane], s[_SQUARES + lane]
                    product = products - weight * value * code
                    square = squares - weight * code * code
                    possible = (product > _ZERO) & ((square > _ZERO) | (low < _ZERO))
                    new = rounded(value * square / product, low, high)
                    with_product = product + weight * value * new
                    with_square = square + weight * new * new
                    gained = with_product * with_product * squares
                    better = gained > products * products * with_square
                    better &= possible & (new != code) & (with_square > _ZERO)
                    cs[index, lane] = new if better else code
                    s[_PRODUCTS + lane] = with_product if better else products
                    s[_SQUARES + lane] = with_square if better else squares
                    s[_TRIED + lane] += _ONE if better else _ZERO
            if not s[_TRIED : _TRIED + LANES].any():
                break
        count = min(LANES, x.shape[1] - first)
        for lane in range(count):
            products, squares = s[_PRODUCTS + lane], s[_SQUARES + lane]
            scales[first + lane] = products / squares if squares > _ZERO else _ZERO
        store(cs, first, codes)
