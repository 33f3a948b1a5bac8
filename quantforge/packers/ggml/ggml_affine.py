"""Loop of `ggml_search` for grids with a minimum, compiled by numba; panels and scratch as in `ggml_loops`."""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import inner, jit
from quantforge.packers.ggml.ggml_loops import load, store
from quantforge.packers.ggml.panel_loops import TOGETHER, rounded
from quantforge.packers.ggml.panels import LANES

_ZERO, _ONE = numpy.float32(0), numpy.float32(1)
# Places in the scratch.
_PRODUCTS, _SQUARES, _ONES = (place * LANES for place in range(3))
_SCALE, _BEST, _INVERSE, _LEAST, _MOST = (place * LANES for place in range(3, 8))
_WEIGHT, _MEAN, _ERROR = (place * LANES for place in range(8, 11))
_TRIED, _FITTED, _LOWEST = (place * LANES for place in range(11, 14))
_SCRATCH = 14 * LANES


@inner
def frame(x, w, s):  # type: ignore[no-untyped-def]
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
def line(x, w, s, high):  # type: ignore[no-untyped-def]
    """Fit scale and minimum to the codes of the candidate."""
    for lane in range(LANES):
        s[_ONES + lane], s[_SQUARES + lane], s[_PRODUCTS + lane] = _ZERO, _ZERO, _ZERO
    for first in range(0, x.shape[0], TOGETHER):
        for lane in range(LANES):
            inverse, least = s[_TRIED + lane], s[_LEAST + lane]
            ones, squares, products = s[_ONES + lane], s[_SQUARES + lane], s[_PRODUCTS + lane]
            for index in range(TOGETHER):
                value, weight = x[first + index, lane], w[first + index, lane]
                code = rounded(inverse * (value - least), _ZERO, high)
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
def lost(x, w, s, high, absolute):  # type: ignore[no-untyped-def]
    """Sum weighted errors of the candidate's scale and minimum: magnitudes with ``absolute``, else squares."""
    for lane in range(LANES):
        s[_ERROR + lane] = _ZERO
    for first in range(0, x.shape[0], TOGETHER):
        for lane in range(LANES):
            inverse, least, error = s[_TRIED + lane], s[_LEAST + lane], s[_ERROR + lane]
            fitted, lowest = s[_FITTED + lane], s[_LOWEST + lane]
            for index in range(TOGETHER):
                value, weight = x[first + index, lane], w[first + index, lane]
                code = rounded(inverse * (value - least), _ZERO, high)
                difference = fitted * code + lowest - value
                other = abs(difference) if absolute else difference * difference
                error += weight * other
            s[_ERROR + lane] = error


@jit
def affine(x, weights, high, widths, absolute, scales, lowered, codes):  # type: ignore[no-untyped-def]
    """Search as `ggml_search.affine` does; inverses: the first ``high / range``, then ``widths / (most - least)``."""
    s = numpy.empty(_SCRATCH, numpy.float32)
    floor = numpy.empty(LANES, numpy.float32)
    start = numpy.empty(LANES, numpy.float32)
    xs = numpy.empty((x.shape[0], LANES), numpy.float32)
    ws = numpy.empty((x.shape[0], LANES), numpy.float32)
    for first in range(0, x.shape[1], LANES):
        load(x, first, xs)
        load(weights, first, ws)
        frame(xs, ws, s)
        for lane in range(LANES):
            least = s[_LEAST + lane]
            floor[lane] = _ZERO if least > _ZERO else least
            s[_LEAST + lane] = floor[lane]
            s[_TRIED + lane] = high / (s[_MOST + lane] - floor[lane])
            s[_FITTED + lane], s[_LOWEST + lane] = _ONE / s[_TRIED + lane], floor[lane]
        lost(xs, ws, s, high, absolute)
        for lane in range(LANES):
            s[_SCALE + lane], s[_BEST + lane] = s[_FITTED + lane], s[_ERROR + lane]
            s[_INVERSE + lane], start[lane] = s[_TRIED + lane], floor[lane]
        for trial in range(len(widths)):
            for lane in range(LANES):
                s[_TRIED + lane] = widths[trial] / (s[_MOST + lane] - s[_LEAST + lane])
            line(xs, ws, s, high)
            lost(xs, ws, s, high, absolute)
            for lane in range(LANES):
                error = s[_ERROR + lane]
                better = (s[_SQUARES + lane] > _ZERO) & (error < s[_BEST + lane])
                s[_BEST + lane] = error if better else s[_BEST + lane]
                s[_SCALE + lane] = s[_FITTED + lane] if better else s[_SCALE + lane]
                s[_INVERSE + lane] = s[_TRIED + lane] if better else s[_INVERSE + lane]
                start[lane] = s[_LEAST + lane] if better else start[lane]
                s[_LEAST + lane] = s[_LOWEST + lane] if better else s[_LEAST + lane]
        count = min(LANES, x.shape[1] - first)
        for lane in range(count):
            flat = s[_MOST + lane] <= floor[lane]
            scales[first + lane] = _ZERO if flat else s[_SCALE + lane]
            lowered[first + lane] = -floor[lane] if flat else -s[_LEAST + lane]
        for index in range(x.shape[0]):
            for lane in range(LANES):
                code = rounded(s[_INVERSE + lane] * (xs[index, lane] - start[lane]), _ZERO, high)
                xs[index, lane] = _ZERO if s[_MOST + lane] <= floor[lane] else code
        store(xs, first, codes)
