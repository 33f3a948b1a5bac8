"""ggml's search for IQ2 and IQ3, to the last bit, in loops that numba compiles.

ggml rounds each group of a block with 13 to 31 scales: magnitudes to digits (places in `Lattice.values`, as odd numbers
``2 digit + 1``), the digits of each part (the 4 or 8 weights of a point) to a point, and keeps the scale with the
greatest ``product^2 / square``, where ``product = sum w x q`` and ``square = sum w q^2``. To have its bytes, sums are
float32 in the order of the elements, products are grouped as in ggml, and of equal candidates the first is taken. Two
shortcuts find the same bits with less work:

- *Runs of scales.* From one scale to the next few digits change, so each part has runs of scales with the same digits
  (its key). Between two points the sign of the difference of their distances is that of a linear function of the scale:
  a point that is nearest at both ends of a run, by more than rounding (`MARGIN`), is nearest within it.
- *Sums part by part.* Changes at the ends of runs add up to approximate sums for every scale. Only scales within
  `REACH` of the greatest are tried as ggml tries them; rounding moves a value by less than half of that.

Points lie as `quantforge.packers.lattices.points.NeighborLists` says: ``tables`` is one of these. Read `search` first.
"""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import (
    LANE_NUMBERS,
    LARGEST,
    below,
    borrowing,
    copy,
    differing,
    fill,
    first_bit,
    first_of,
    fused,
    greater,
    jit,
    lane_min,
    lane_sum,
    last_bit,
    lesser,
    load,
    pick,
    spread,
    store,
)

ALWAYS, OFF_GRID, ALL_IF_ANY = range(3)  # which points are chosen again with the scale found
# Tries on either side, whether they begin with a fit, which points are chosen again; then what one try changes the
# inverse scale by, the least maximum of a group, and the factor of the unit.
SEARCHES = {
    "iq2_xxs": ((6, True, ALWAYS), (0.1, 1e-15, 1.0)),
    "iq2_xs": ((9, False, OFF_GRID), (0.1, 1e-15, 1.0)),
    "iq2_s": ((9, False, OFF_GRID), (0.1, 1e-8, 0.9875)),
    "iq3_xxs": ((15, False, OFF_GRID), (0.2, 1e-8, 1.0125)),
    "iq3_s": ((9, False, ALL_IF_ANY), (0.2, 1e-45, 1.033)),
}
STRIDE = 48  # of the keys of a part: 8 before them
REACH = 2e-5
# Of distances by sums, relative to the greatest they are made of: more than two ways of measuring them can differ.
MARGIN = numpy.float32(256 * 2.0**-24)
# Beyond these scales and margins, numbers could leave the range in which that holds.
LEAST, SMALL, HUGE = numpy.float32(1e-10), numpy.float32(1e-30), numpy.float32(1e10)
_LEAST_SUM, _GREATEST_SUM = numpy.float32(1e-14), numpy.float32(1e14)
_EPSILON = numpy.float32(1e-15)
_MAGIC = numpy.float32(1.5 * 2**23)  # added and subtracted, it rounds to an integer, halves to even
_ZERO, _HALF, _ONE = numpy.float32(0), numpy.float32(0.5), numpy.float32(1)
_TENTH, _EIGHT, _COLUMNS = numpy.float32(0.1), numpy.float32(8), numpy.float32(256)


@jit
def compute_error_weights(x, importance, twice, share, w):  # type: ignore[no-untyped-def]
    """Fill in the weights of errors: ``importance sqrt(mean + x^2)``, or without one ``share * mean + x^2``.

    Args:
        x: float32 ``[blocks, 256]``.
        importance: float32 ``[blocks of a row, 256]``, or ``[0, 256]``.
        twice: whether the mean of the squares of a block, summed in the order of its columns, counts twice.
        share: of the mean where no importance is known.
        w: float32 ``[blocks, 256]``, filled in.
    """
    last, sums = len(x) - 1, numpy.empty(4, numpy.float32)
    for first in range(0, len(x), 4):  # side by side, since each sum waits for the one before
        rows = (first, min(first + 1, last), min(first + 2, last), min(first + 3, last))
        a, b, c, d = _ZERO, _ZERO, _ZERO, _ZERO
        for i in range(256):
            a += x[rows[0], i] * x[rows[0], i]
            b += x[rows[1], i] * x[rows[1], i]
            c += x[rows[2], i] * x[rows[2], i]
            d += x[rows[3], i] * x[rows[3], i]
        sums[0], sums[1], sums[2], sums[3] = a, b, c, d
        for block in range(first, min(first + 4, len(x))):
            whole, mine, out = sums[block - first], x[block], w[block]
            mean = (whole + whole if twice else whole) / _COLUMNS
            if len(importance):
                known = importance[block % len(importance)]
                for i in range(256):
                    out[i] = numpy.sqrt(mean + mine[i] * mine[i]) * known[i]
            else:
                part = share * mean if share > _ZERO else _ZERO
                for i in range(256):
                    out[i] = part + mine[i] * mine[i]


@jit
def search(x, w, form, options, numbers, tables, odd, points, signs, scales, levels, units):  # type: ignore[no-untyped-def]
    """Choose points, signs and scales of blocks.

    Args:
        x, w: values and their weights, float32 ``[blocks, 256]``.
        form: columns of a group, a tuple as long as a point has values (so that loops over them are unrolled), digits.
        options: whether signs are even, then the integers of `SEARCHES`.
        numbers: those of `SEARCHES`, float32.
        tables: `Neighbours`.
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
    tried_scratch = (roots, wx, seen, mine, steps, runs, sums)
    scratch = (values, numpy.empty(size, numpy.uint8), on_grid, tried_scratch)
    _quantize_blocks(
        x,
        w,
        form,
        options,
        tops,
        (least, fudge),
        tables,
        odd,
        points,
        signs,
        scales,
        levels,
        units,
        scratch,
    )


@borrowing
def _quantize_blocks(  # type: ignore[no-untyped-def]
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
            scales[block, group] = _quantize_group(
                x[block, run],
                w[block, run],
                form,
                options,
                tops,
                least,
                tables,
                odd,
                points[block, part],
                mask,
                scratch,
            )
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
            levels[block, group] = nearest_level(inverse * scales[block, group], 15)


@borrowing
def _quantize_group(xs, ws, form, options, tops, least, tables, odd, points, mask, scratch):  # type: ignore[no-untyped-def]
    """Fill in points and signs of one group and return its scale."""
    size, _, base = form
    even, tries, positive, again = options
    values, codes, on_grid, tried_scratch = scratch
    roots, wx, (inverses, scales, _, _, _) = tried_scratch[0], tried_scratch[1], tried_scratch[4]
    top = numpy.float32(2 * base - 1)
    for first in range(0, size, 8):
        mask[first // 8] = split_signs(xs, ws, first, even, values)
    fill(points, tables[0][0])
    high = values[0]
    for i in range(size):
        high = max(high, values[i])
    for i in range(size):
        roots[i] = numpy.sqrt(ws[i])
        wx[i] = ws[i] * values[i]
    start = high
    if high >= least and positive:
        start = _positive_scale(values, ws, base + 1, codes) * numpy.float32(base)
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
    scale = _best_scale(values, ws, form, count, tables, odd, scale, points, on_grid, tried_scratch)
    missed = again == ALWAYS
    for part in range(len(points)):
        missed |= not on_grid[part]
    if scale > _ZERO and missed:
        if again != OFF_GRID:
            fill(on_grid, False)
        _snap_to_points(values, roots, form, scale, tables, points, on_grid)
        product, square = _fit_sums(wx, ws, points, odd, form[1])
        if square > _ZERO:
            scale = product / square
    if scale < _ZERO:
        scale = -scale
        for i in range(size // 8):
            mask[i] ^= 255
    return scale


@borrowing
def split_signs(x, w, first, even, magnitudes):  # type: ignore[no-untyped-def]
    """Fill in 8 magnitudes from ``first`` on and return the mask of the negative ones.

    With ``even`` the number of negative signs has to be even: where it is not, the magnitude that costs least keeps the
    wrong sign.
    """
    value, zero = load(x, first), spread(_ZERO)
    store(magnitudes, first, pick(value, zero, zero - value, value))
    mask = below(value, zero)
    odd = mask ^ mask >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    if even and odd & 1:
        cheapest, _ = first_of(load(w, first) * value * value, load(LANE_NUMBERS, 0))
        magnitudes[first + cheapest] = -magnitudes[first + cheapest]
        mask ^= 1 << cheapest
    return mask


@borrowing
def _round_even(value):  # type: ignore[no-untyped-def]
    """Round to the nearest integer, halves to even."""
    return (value + _MAGIC) - _MAGIC


@borrowing
def nearest_level(ratio, top):  # type: ignore[no-untyped-def]
    """Return the digit ``0..top`` whose odd number ``2 digit + 1`` is nearest to ``ratio``."""
    found = numpy.int32(_round_even(_HALF * (ratio - _ONE)))
    return min(max(found, 0), top)


@borrowing
def _positive_scale(x, w, most, digits):  # type: ignore[no-untyped-def]
    """Return the scale that ggml finds for values that are not negative [make_qp_quants]; ``digits`` is scratch.

    Codes of negative values wrap around, as they do in ggml.
    """
    size, top = len(x), numpy.float32(most)
    high = _ZERO
    for i in range(size):
        high = max(high, x[i])
    if high < _EPSILON:
        return _ZERO
    inverse = top / high
    scale, best = _ONE / inverse, _ZERO
    for i in range(size):
        wrapped = numpy.uint8(numpy.int32(_round_even(inverse * x[i])))
        diff = x[i] - scale * numpy.float32(wrapped)
        best += w[i] * diff * diff
    for tenth in range(-4, 5):
        if tenth == 0:
            continue
        tried = (_TENTH * numpy.float32(tenth) + top) / high
        scale, error = _ONE / tried, _ZERO
        for i in range(size):
            diff = x[i] - scale * min(top, _round_even(tried * x[i]))
            error += w[i] * diff * diff
        if error < best:
            best, inverse = error, tried
    sumlx, suml2 = _ZERO, _ZERO
    for i in range(size):
        code = min(top, _round_even(inverse * x[i]))
        digits[i] = numpy.uint8(numpy.int32(code))
        sumlx += w[i] * x[i] * code
        suml2 += w[i] * code * code
    for _ in range(5):
        changed = False
        for i in range(size):
            old = numpy.float32(digits[i])
            slx, sl2 = sumlx - w[i] * x[i] * old, suml2 - w[i] * old * old
            if not (slx > _ZERO and sl2 > _ZERO):
                continue
            new = min(top, _round_even(x[i] * sl2 / slx))
            if new == old:
                continue
            slx += w[i] * x[i] * new
            sl2 += w[i] * new * new
            if slx * slx * suml2 > sumlx * sumlx * sl2:
                digits[i] = numpy.uint8(numpy.int32(new))
                sumlx, suml2, changed = slx, sl2, True
        if not changed:
            break
    return sumlx / suml2 if suml2 > _ZERO else _ZERO


@borrowing
def _best_scale(values, w, form, count, tables, odd, scale, points, on_grid, scratch):  # type: ignore[no-untyped-def]
    """Fill in the points of the best scale, and which of them are on the grid, and return the scale."""
    roots, wx, seen, mine, scales, runs, sums = scratch
    parts, large = len(points), _ZERO
    for i in range(len(values)):
        large += abs(wx[i])
    begun = _find_runs(values, w, roots, wx, form, count, tables, odd, scales, runs, sums)
    limit, best = _least_quality(sums, begun, large), _ZERO
    while begun:  # other scales have the points of the one before
        t = first_bit(begun)
        begun &= begun - 1
        if sums[t, 0] * sums[t, 0] < limit * sums[t, 1]:
            continue
        _points_at(runs, parts, t, mine, seen)
        product, square = _fit_sums(wx, w, mine, odd, form[1])
        if square > _ZERO and product * product > best * square:
            scale = product / square
            best = scale * product
            copy(points, mine)
            copy(on_grid, seen)
    return scale


@borrowing
def _fit_sums(wx, w, points, odd, lanes):  # type: ignore[no-untyped-def]
    """Return the two sums of the best scale for given points."""
    product, square, width = _ZERO, _ZERO, len(lanes)
    for part in range(len(points)):
        for i in range(width):
            q = odd[points[part], i]
            product += wx[part * width + i] * q
            square += w[part * width + i] * q * q
    return product, square


# Runs of scales


@borrowing
def _find_runs(values, w, roots, wx, form, count, tables, odd, scratch, runs, sums):  # type: ignore[no-untyped-def]
    """Fill in the runs of all parts and where sums change; return bits, set for scales at which a run begins."""
    size, lanes, base = form
    inverses, scales, keys, pulls, _ = scratch
    place, begin, many = tables[0], tables[1], tables[2]
    marks, width, begun = runs[0], len(lanes), numpy.int64(0)
    _find_keys(values, size, lanes, base, inverses, count, keys)
    for t in range(count + 1):
        sums[t, 0] = sums[t, 1] = 0.0
    high = scales[0] * numpy.float32(2 * base - 1)
    for first in range(0, size, 8):
        value = load(roots, first) * load(values, first)
        store(pulls, first, value + value)
    for part in range(size // width):
        first, bound = part * width, _ZERO
        for i in range(first, first + width):
            bound += roots[i] * (values[i] * values[i] + high * high)
        marks[part] = 0
        bits = _key_changes(keys, part, count)
        while bits:
            start = first_bit(bits)
            bits &= bits - 1
            last = (first_bit(bits) if bits else count) - 1
            key = int(keys[part * STRIDE + 8 + start])
            point = place[key]
            if point >= 0:
                _add_run(runs, part, start, last + 1, point, True, sums, wx, w, odd, lanes)
            else:
                _add_runs_off_grid(
                    begin[key],
                    many[key],
                    start,
                    last,
                    part,
                    bound * MARGIN,
                    values,
                    roots,
                    form,
                    tables,
                    odd,
                    scratch,
                    runs,
                    sums,
                    wx,
                    w,
                )
        begun |= marks[part]
    return begun


@borrowing
def _find_keys(values, size, lanes, base, inverses, count, keys):  # type: ignore[no-untyped-def]
    """Fill in the keys of all parts for all scales."""
    one, half, magic, zero = spread(_ONE), spread(_HALF), spread(_MAGIC), spread(_ZERO)
    width = len(lanes)
    top = spread(numpy.float32(base - 1))
    for part in range(size // width):
        for first in range(0, count, 8):
            inverse, key, power = load(inverses, first), zero, one
            for i in range(part * width, part * width + width):
                digit = half * (inverse * spread(values[i]) - one)
                digit = lesser(greater((digit + magic) - magic, zero), top)
                key += power * digit
                power = power * spread(numpy.float32(base))
            store(keys, part * STRIDE + 8 + first, key)


@borrowing
def _key_changes(keys, part, count):  # type: ignore[no-untyped-def]
    """Return bits: set where the key of a part differs from that of the scale before, and for the first scale."""
    bits = numpy.int64(1)
    for first in range(0, count, 8):
        place = part * STRIDE + 8 + first
        bits |= differing(load(keys, place), load(keys, place - 1)) << first
    return (bits | 1) & ((numpy.int64(1) << count) - 1)


@borrowing
def _add_run(runs, part, start, stop, point, on_grid, sums, wx, w, odd, lanes):  # type: ignore[no-untyped-def]
    """Record a run of scales with one point; add its sums where it begins and subtract them where it ends."""
    marks, points, known = runs
    first, product, square = part * len(lanes), _ZERO, _ZERO
    marks[part] |= numpy.int64(1) << start
    points[part, start], known[part, start] = point, on_grid
    if len(lanes) == 8:
        value = load(odd, 8 * point)
        product = lane_sum(load(wx, first) * value)
        square = lane_sum(load(w, first) * value * value)
    else:
        for i in range(len(lanes)):
            q = odd[point, i]
            product += wx[first + i] * q
            square += w[first + i] * q * q
    sums[start, 0] += product
    sums[start, 1] += square
    sums[stop, 0] -= product
    sums[stop, 1] -= square


@borrowing
def _add_runs_off_grid(  # type: ignore[no-untyped-def]
    run, length, start, last, part, margin, x, roots, form, tables, odd, scratch, runs, sums, wx, w
):
    """Record the runs of points within a run of scales whose key is not a point."""
    near, index = tables[3], tables[4]
    _, scales, _, pulls, terms = scratch
    lanes = form[1]
    first, row = part * len(lanes), run * len(lanes)
    sure = length <= 64 and SMALL < margin < HUGE
    sure &= scales[-1] > LEAST and scales[0] < _ONE / LEAST
    if sure:
        _measure_points(near, row, length, pulls, roots, first, lanes, terms)
    while start <= last:
        high, found = start, -1
        if sure:
            found = _surely_nearest(terms, length, scales[start], margin)
        if found < 0:
            found = _nearest_point(near, row, length, scales[start], x, roots, first, lanes)
        else:
            high = last
            while high > start and _surely_nearest(terms, length, scales[high], margin) != found:
                high = (start + high) >> 1
        _add_run(runs, part, start, high + 1, index[run + found], False, sums, wx, w, odd, lanes)
        start = high + 1


@borrowing
def _least_quality(sums, begun, large):  # type: ignore[no-untyped-def]
    """Sum up, and return the least ``product^2 / square`` to be tried; ``large``: the sum of ``|w x|``."""
    best, under, product, square = 0.0, 1.0, 0.0, 0.0
    while begun:
        t = first_bit(begun)
        begun &= begun - 1
        product += sums[t, 0]
        square += sums[t, 1]
        sums[t, 0], sums[t, 1] = product, square
        squared = product * product
        if squared * under > best * square:
            best, under = squared, square
    in_range = min(large, under) > _LEAST_SUM and max(large, under) < _GREATEST_SUM
    clear = best > 0.25 * large * large
    return best / under * (1 - REACH) if in_range and clear else -1.0


@borrowing
def _points_at(runs, parts, t, points, on_grid):  # type: ignore[no-untyped-def]
    """Fill in the points of all parts for scale ``t``, and which of them are on the grid."""
    marks, found, known = runs
    until = (numpy.int64(2) << t) - 1
    for part in range(parts):
        start = last_bit(marks[part] & until)
        points[part], on_grid[part] = found[part, start], known[part, start]


# The nearest of a few points: 8 side by side, each in the order of its values; the first of equal ones


@borrowing
def _snap_to_points(values, roots, form, scale, tables, points, skip):  # type: ignore[no-untyped-def]
    """Choose the points nearest to ``values`` at ``scale``, except for parts with ``skip``."""
    place, start, count, near, index = tables[0], tables[1], tables[2], tables[3], tables[4]
    size, lanes, base = form
    inverse, width = _ONE / scale, len(lanes)
    for part in range(size // width):
        if skip[part]:
            continue
        first, key, power = part * width, 0, 1
        for i in range(first, first + width):
            key += power * nearest_level(inverse * values[i], base - 1)
            power *= base
        points[part] = place[key]
        if points[part] < 0:
            run, many = start[key], count[key]
            found = _nearest_point(near, run * width, many, scale, values, roots, first, lanes)
            points[part] = index[run + found]


@borrowing
def _nearest_point(near, first, many, scale, x, w, place, lanes):  # type: ignore[no-untyped-def]
    """Return which of ``many`` points, from ``first`` in ``near`` on, is nearest to the values from ``place`` on."""
    scales, number, padded = spread(scale), load(LANE_NUMBERS, 0), (many + 7) & -8
    best, found = spread(LARGEST), number
    for point in range(first, first + many, 8):
        apart = scales * load(near, point) - spread(x[place])
        tried = spread(w[place]) * apart * apart
        for i in range(1, len(lanes)):
            apart = scales * load(near, point + i * padded) - spread(x[place + i])
            tried += spread(w[place + i]) * apart * apart
        found = pick(tried, best, number, found)
        best = lesser(tried, best)
        number += spread(_EIGHT)
    return first_of(best, found)[0]


@borrowing
def point_sums(near, first, padded, pulls, start, w, place, lanes):  # type: ignore[no-untyped-def]
    """Return two sums of 8 points, ``w q^2`` and ``pulls q``; both arrays are of values, from their places on."""
    square, product = spread(_ZERO), spread(_ZERO)
    for i in range(len(lanes)):
        q = load(near, first + i * padded)
        square = fused(spread(w[place + i]) * q, q, square)
        product = fused(spread(pulls[start + i]), q, product)
    return square, product


@borrowing
def _measure_points(near, first, many, pulls, w, place, lanes, terms):  # type: ignore[no-untyped-def]
    """Fill in the two sums of ``many`` points, 8 of one and 8 of the other in turn.

    With ``pulls`` of ``2 w x`` the distance at a scale is ``scale (scale w q^2 - pulls q)`` and what all points share.
    """
    padded = (many + 7) & -8
    for point in range(0, many, 8):
        square, product = point_sums(near, first + point, padded, pulls, place, w, place, lanes)
        store(terms, 2 * point, square)
        store(terms, 2 * point + 8, product)


@borrowing
def _surely_nearest(terms, many, scale, margin):  # type: ignore[no-untyped-def]
    """Return which of up to 64 measured points is nearer than all others by ``margin``, or -1."""
    scales, low = spread(scale), spread(LARGEST)
    for point in range(0, 2 * many, 16):
        low = lesser(scales * (scales * load(terms, point) - load(terms, point + 8)), low)
    limit, bits = spread(lane_min(low) + margin), numpy.int64(0)
    for point in range(0, 2 * many, 16):
        tried = scales * (scales * load(terms, point) - load(terms, point + 8))
        bits |= below(tried, limit) << (point >> 1)
    bits &= (numpy.int64(2) << (many - 1)) - 1  # padding repeats the last point
    return first_bit(bits) if bits and not bits & (bits - 1) else -1
