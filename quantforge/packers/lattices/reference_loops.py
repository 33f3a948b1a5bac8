"""ggml's searches for the lattice types of 2 and 3 bits, restated in loops that numba compiles.

To have its bytes, sums go in the order of the elements, in float32, products are grouped as there, and of equal
candidates the first is taken. What is done otherwise is faster and gives the same bits: see `try_loops`.
"""

from __future__ import annotations

import numpy

from quantforge.packers.ggml.panel_loops import borrowing, copy, fill, jit
from quantforge.packers.lattices.eights import first_bit, load, spread, store
from quantforge.packers.lattices.lattice_types import ALL_IF_ANY, ALWAYS, OFF_GRID
from quantforge.packers.lattices.near_loops import nearest
from quantforge.packers.lattices.sign_loops import non_negative, turned, whole
from quantforge.packers.lattices.try_loops import STRIDE, limit_of, points_at, runs_of

_ZERO, _HALF, _ONE = numpy.float32(0), numpy.float32(0.5), numpy.float32(1)


@borrowing
def level(ratio, top):  # type: ignore[no-untyped-def]
    """Return the digit ``0..top`` whose odd number ``2 digit + 1`` is nearest to ``ratio``."""
    found = numpy.int32(whole(_HALF * (ratio - _ONE)))
    return min(max(found, 0), top)


@borrowing
def _snap(values, roots, form, scale, tables, points, skip):  # type: ignore[no-untyped-def]
    """Choose the points nearest to ``values`` at ``scale``, but for those that ``skip`` says."""
    place, start, count, near, index = tables[0], tables[1], tables[2], tables[3], tables[4]
    size, lanes, base = form
    inverse, width = _ONE / scale, len(lanes)
    for part in range(size // width):
        if skip[part]:
            continue
        first, key, power = part * width, 0, 1
        for i in range(first, first + width):
            key += power * level(inverse * values[i], base - 1)
            power *= base
        points[part] = place[key]
        if points[part] < 0:
            run, many = start[key], count[key]
            found = nearest(near, run * width, many, scale, values, roots, first, lanes)
            points[part] = index[run + found]


@borrowing
def _fitted(wx, w, points, odd, lanes):  # type: ignore[no-untyped-def]
    """Return the two sums of the best scale for given points."""
    product, square, width = _ZERO, _ZERO, len(lanes)
    for part in range(len(points)):
        for i in range(width):
            q = odd[points[part], i]
            product += wx[part * width + i] * q
            square += w[part * width + i] * q * q
    return product, square


@borrowing
def _tried(values, w, form, count, tables, odd, scale, points, on_grid, scratch):  # type: ignore[no-untyped-def]
    """Fill in the points of the best of some scales, and which of them are on the grid, and return the scale."""
    roots, wx, seen, mine, scales, runs, sums = scratch
    parts, large = len(points), _ZERO
    for i in range(len(values)):
        large += abs(wx[i])
    begun = runs_of(values, w, roots, wx, form, count, tables, odd, scales, runs, sums)
    limit, best = limit_of(sums, begun, large), _ZERO
    while begun:  # the others have the points of the one before
        t = first_bit(begun)
        begun &= begun - 1
        if sums[t, 0] * sums[t, 0] < limit * sums[t, 1]:
            continue
        points_at(runs, parts, t, mine, seen)
        product, square = _fitted(wx, w, mine, odd, form[1])
        if square > _ZERO and product * product > best * square:
            scale = product / square
            best = scale * product
            copy(points, mine)
            copy(on_grid, seen)
    return scale


@borrowing
def _chosen(xs, ws, form, options, tops, least, tables, odd, points, mask, scratch):  # type: ignore[no-untyped-def]
    """Fill in points and signs of one group and return its scale."""
    size, _, base = form
    even, tries, positive, again = options
    values, codes, on_grid, inner_scratch = scratch
    roots, wx, (inverses, scales, _, _, _) = inner_scratch[0], inner_scratch[1], inner_scratch[4]
    top = numpy.float32(2 * base - 1)
    turned(xs, ws, size, even, values, mask)
    fill(points, tables[0][0])
    high = values[0]
    for i in range(size):
        high = max(high, values[i])
    for i in range(size):
        roots[i] = numpy.sqrt(ws[i])
        wx[i] = ws[i] * values[i]
    start = high
    if high >= least and positive:
        start = non_negative(values, ws, base + 1, codes) * numpy.float32(base)
    if high < least or start <= _ZERO:
        fill(mask, 0)
        return _ZERO
    scale = start / numpy.float32(base) if positive else high / top
    fill(on_grid, again != ALL_IF_ANY)
    count = 2 * tries + 1
    for t in range(0, len(scales), 8):
        inverse = load(tops, t) / spread(start)
        store(inverses, t, inverse)
        store(scales, t, spread(_ONE) / inverse)
    scale = _tried(values, ws, form, count, tables, odd, scale, points, on_grid, inner_scratch)
    missed = again == ALWAYS
    for part in range(len(points)):
        missed |= not on_grid[part]
    if scale > _ZERO and missed:
        if again != OFF_GRID:
            fill(on_grid, False)
        _snap(values, roots, form, scale, tables, points, on_grid)
        product, square = _fitted(wx, ws, points, odd, form[1])
        if square > _ZERO:
            scale = product / square
    if scale < _ZERO:
        scale = -scale
        for i in range(size // 8):
            mask[i] ^= 255
    return scale


@borrowing
def _blocks(  # type: ignore[no-untyped-def]
    x, w, form, options, tops, limits, tables, odd, points, signs, scales, levels, units, scratch
):
    least, fudge = limits
    size, parts = form[0], form[0] // len(form[1])
    for block in range(len(x)):
        most = _ZERO
        for group in range(256 // size):
            run = slice(group * size, group * size + size)
            part = slice(group * parts, group * parts + parts)
            mask = signs[block, group * size // 8 : (group + 1) * size // 8]
            scales[block, group] = _chosen(
                x[block, run], w[block, run], form, options, tops, least, tables, odd,
                points[block, part], mask, scratch,
            )  # fmt: skip
            most = max(most, scales[block, group])
        unit = most / numpy.float32(31)
        units[block] = unit * fudge
        fill(levels[block], 0)
        if most == _ZERO:
            fill(points[block], tables[0][0])
            fill(signs[block], 0)
            continue
        inverse = _ONE / unit
        for group in range(256 // size):
            levels[block, group] = level(inverse * scales[block, group], 15)


@jit
def search(x, w, form, options, numbers, tables, odd, points, signs, scales, levels, units):  # type: ignore[no-untyped-def]
    """Choose points, signs and scales of blocks.

    Args:
        x, w: values and their weights, float32 ``[blocks, 256]``.
        form: columns of a group, a tuple as long as a point has values, digits.
        options: whether signs are even, tries to either side, whether the first scale is that of `non_negative`, and
            which points are chosen again.
        numbers: what one try changes the inverse scale by, the least maximum, what the unit is multiplied with.
        tables: of `neighbours`.
        odd: the points in odd numbers, float32 ``[points, width]``.
        points: int32 ``[blocks, 256 / width]``, filled in, as are
        signs: uint8 ``[blocks, 32]``, and ``scales``: float32, ``levels`` uint8 ``[blocks, groups]``, ``units``.
    """
    size, width = form[0], len(form[1])
    parts, tries = size // width, options[1]
    step, least, fudge = numbers
    count = (2 * tries + 8) // 8 * 8
    # How many steps the largest value is tried to be.
    tops = numpy.empty(count, numpy.float32)
    for t in range(count):
        tops[t] = numpy.float32(2 * form[2] - 1) + numpy.float32(min(t - tries, tries)) * step
    values, roots, wx = numpy.empty((3, size), numpy.float32)
    seen, on_grid = numpy.empty((2, parts), numpy.bool_)
    steps = (
        numpy.empty(count, numpy.float32),
        numpy.empty(count, numpy.float32),
        numpy.zeros(parts * STRIDE + 8, numpy.float32),
        numpy.empty(size, numpy.float32),
        numpy.empty(128, numpy.float32),
    )
    runs = (
        numpy.empty(parts, numpy.int64),
        numpy.empty((parts, count), numpy.int64),
        numpy.empty((parts, count), numpy.bool_),
    )
    sums = numpy.empty((count + 1, 2), numpy.float64)
    mine = numpy.empty(parts, numpy.int32)
    inner_scratch = (roots, wx, seen, mine, steps, runs, sums)
    scratch = (values, numpy.empty(size, numpy.uint8), on_grid, inner_scratch)
    _blocks(
        x, w, form, options, tops, (least, fudge), tables, odd, points, signs, scales, levels, units, scratch
    )  # fmt: skip
