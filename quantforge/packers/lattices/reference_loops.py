"""ggml's searches for the lattice types of 2 and 3 bits, restated in loops that numba compiles.

To have its bytes, sums go in the order of the elements, in float32, products are grouped as there, and of equal
candidates the first is taken. What is done otherwise is faster and gives the same bits: the points around a vector are
measured side by side.
"""

from __future__ import annotations

import numpy

from quantforge.packers.ggml.panel_loops import inner, jit
from quantforge.packers.lattices.sign_loops import non_negative, turned, whole

ALWAYS, OFF_GRID, ALL_IF_ANY = range(
    3
)  # which points are chosen once more with the scale that was found
_MAGIC = numpy.float32(
    12582912.0
)  # 1.5 * 2^23: added and taken away, it rounds to an integer, halves to even
_ZERO, _HALF, _ONE, _TENTH = (numpy.float32(value) for value in (0, 0.5, 1, 0.1))
_LARGEST = numpy.float32(3.4028234663852886e38)


@inner
def level(ratio, top):  # type: ignore[no-untyped-def]
    """Return the digit ``0..top`` whose odd number ``2 digit + 1`` is nearest to ``ratio``."""
    found = numpy.int32(whole(_HALF * (ratio - _ONE)))
    return min(max(found, 0), top)


@inner
def nearest_of_eight(near, first, count, scale, shift, x, w, place, distance):  # type: ignore[no-untyped-def]
    """Return which of ``count`` points, from ``first`` in ``near`` on, is nearest to 8 values from ``place`` on."""
    x0, x1, x2, x3 = x[place], x[place + 1], x[place + 2], x[place + 3]
    x4, x5, x6, x7 = x[place + 4], x[place + 5], x[place + 6], x[place + 7]
    w0, w1, w2, w3 = w[place], w[place + 1], w[place + 2], w[place + 3]
    w4, w5, w6, w7 = w[place + 4], w[place + 5], w[place + 6], w[place + 7]
    rows = near[first : first + 8 * count].reshape(8, count)
    for point in range(count):
        d = scale * (rows[0, point] + shift) - x0
        total = w0 * d * d
        d = scale * (rows[1, point] + shift) - x1
        total += w1 * d * d
        d = scale * (rows[2, point] + shift) - x2
        total += w2 * d * d
        d = scale * (rows[3, point] + shift) - x3
        total += w3 * d * d
        d = scale * (rows[4, point] + shift) - x4
        total += w4 * d * d
        d = scale * (rows[5, point] + shift) - x5
        total += w5 * d * d
        d = scale * (rows[6, point] + shift) - x6
        total += w6 * d * d
        d = scale * (rows[7, point] + shift) - x7
        total += w7 * d * d
        distance[point] = total
    return _least(distance, count)


@inner
def nearest_of_four(near, first, count, scale, x, w, place, distance):  # type: ignore[no-untyped-def]
    """Return the same for points of 4 values."""
    x0, x1, x2, x3 = x[place], x[place + 1], x[place + 2], x[place + 3]
    w0, w1, w2, w3 = w[place], w[place + 1], w[place + 2], w[place + 3]
    rows = near[first : first + 4 * count].reshape(4, count)
    for point in range(count):
        d = scale * rows[0, point] - x0
        total = w0 * d * d
        d = scale * rows[1, point] - x1
        total += w1 * d * d
        d = scale * rows[2, point] - x2
        total += w2 * d * d
        d = scale * rows[3, point] - x3
        total += w3 * d * d
        distance[point] = total
    return _least(distance, count)


@inner
def _least(distance, count):  # type: ignore[no-untyped-def]
    best, found = _LARGEST, 0
    for point in range(count):
        if distance[point] < best:
            best, found = distance[point], point
    return found


@inner
def snap(values, roots, sizes, inverse, scale, tables, digits, on_grid, skip, distance):  # type: ignore[no-untyped-def]
    """Fill in the digits of the points nearest to ``inverse * values``, but for those that ``skip`` says."""
    place, start, count, near, index, table = tables
    size, width, base = sizes
    for part in range(size // width):
        if skip[part]:
            continue
        first, key, power = part * width, 0, 1
        for i in range(width):
            digit = level(inverse * values[first + i], base - 1)
            digits[first + i] = digit
            key += power * digit
            power *= base
        on_grid[part] = place[key] >= 0
        if on_grid[part]:
            continue
        run, many = start[key], count[key]
        if width == 8:
            found = nearest_of_eight(
                near, run * 8, many, scale, _ZERO, values, roots, first, distance
            )
        else:
            found = nearest_of_four(near, run * 4, many, scale, values, roots, first, distance)
        for i in range(width):
            digits[first + i] = table[index[run + found], i]


@inner
def fitted(values, w, digits, size):  # type: ignore[no-untyped-def]
    """Return the two sums of the best scale for given digits."""
    product, square = _ZERO, _ZERO
    for i in range(size):
        q = numpy.float32(2 * numpy.int32(digits[i]) + 1)
        product += w[i] * values[i] * q
        square += w[i] * q * q
    return product, square


@inner
def _chosen(xs, ws, form, step, least, tables, digits, mask, scratch):  # type: ignore[no-untyped-def]
    """Fill in digits and signs of one group and return its scale."""
    size, width, base, even, tries, positive, again = form
    values, roots, tried, codes, on_grid, seen, none, distance = scratch
    top = numpy.float32(2 * base - 1)
    turned(xs, ws, size, even, values, mask)
    digits[:] = 0
    high = values[0]
    for i in range(size):
        roots[i] = numpy.sqrt(ws[i])
        high = max(high, values[i])
    start = high
    if high >= least and positive:
        start = non_negative(values, ws, base + 1, codes) * numpy.float32(base)
    if high < least or start <= _ZERO:
        mask[:] = 0
        return _ZERO
    scale = start / numpy.float32(base) if positive else high / top
    on_grid[:] = again != ALL_IF_ANY
    best, sizes = _ZERO, (size, width, base)
    for number in range(-tries, tries + 1):
        inverse = (top + numpy.float32(number) * step) / start
        snap(values, roots, sizes, inverse, _ONE / inverse, tables, tried, seen, none, distance)
        product, square = fitted(values, ws, tried, size)
        if square > _ZERO and product * product > best * square:
            scale = product / square
            best = scale * product
            digits[:] = tried
            on_grid[:] = seen
    if scale > _ZERO and (again == ALWAYS or not on_grid.all()):
        if again != OFF_GRID:
            on_grid[:] = False
        seen[:] = on_grid
        snap(values, roots, sizes, _ONE / scale, scale, tables, digits, on_grid, seen, distance)
        product, square = fitted(values, ws, digits, size)
        if square > _ZERO:
            scale = product / square
    if scale < _ZERO:
        scale = -scale
        for i in range(size // 8):
            mask[i] ^= 255
    return scale


@jit
def search(x, w, form, numbers, tables, digits, signs, scales, units, levels):  # type: ignore[no-untyped-def]
    """Choose digits, signs and scales of blocks.

    Args:
        x, w: values and their weights, float32 ``[blocks, 256]``.
        form: columns of a group, width of a point, digits, whether signs are even, tries to either side, whether the
            first scale is that of `non_negative`, and which points are chosen again.
        numbers: what one try changes the inverse scale by, the least maximum, what the unit is multiplied with.
        tables: of `neighbours`.
        digits: uint8 ``[blocks, 256]``, filled in, as are
        signs: uint8 ``[blocks, 32]``, and ``scales``: float32, ``levels`` uint8 ``[blocks, groups]``, ``units``.
    """
    size, width = form[0], form[1]
    step, least, fudge = numbers
    values, roots = numpy.empty(size, numpy.float32), numpy.empty(size, numpy.float32)
    tried, codes = numpy.empty(size, numpy.uint8), numpy.empty(size, numpy.uint8)
    on_grid, seen = numpy.empty(size // width, numpy.bool_), numpy.empty(size // width, numpy.bool_)
    none = numpy.zeros(size // width, numpy.bool_)
    distance = numpy.empty(len(tables[5]) + 8, numpy.float32)
    scratch = (values, roots, tried, codes, on_grid, seen, none, distance)
    for block in range(len(x)):
        most = _ZERO
        for group in range(256 // size):
            run = slice(group * size, group * size + size)
            mask = signs[block, group * size // 8 : (group + 1) * size // 8]
            scales[block, group] = _chosen(
                x[block, run],
                w[block, run],
                form,
                step,
                least,
                tables,
                digits[block, run],
                mask,
                scratch,
            )
            most = max(most, scales[block, group])
        unit = most / numpy.float32(31)
        units[block] = unit * fudge
        levels[block] = 0
        if most == _ZERO:
            digits[block], signs[block] = 0, 0
            continue
        inverse = _ONE / unit
        for group in range(256 // size):
            levels[block, group] = level(inverse * scales[block, group], 15)
