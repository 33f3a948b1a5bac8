"""ggml's search for IQ2 and IQ3, to the last bit, in loops compiled by numba.

ggml rounds each group of a block with 13 to 31 scales: magnitudes to digits (indices into `Lattice.magnitudes`, used
as the odd numbers ``2 digit + 1``), the digits of each part (the 4 or 8 weights of a point) to a point. It keeps the
scale with the greatest ``product^2 / square``, where ``product = sum w x q`` and ``square = sum w q^2``. To give the
same bytes, sums here are float32 in the order of the elements, products are grouped as in ggml, and of equal candidates
the first is taken. Two shortcuts find the same bits with less work:

- *Runs of scales.* From one scale to the next few digits change, so each part has runs of scales with the same digits
  (its key). The difference of two points' distances has the sign of a linear function of the scale: a point that is
  nearest at both ends of a run, by more than rounding (`DISTANCE_TOLERANCE`), is nearest within it.
- *Sums part by part.* Changes at the ends of runs add up to approximate sums for every scale. Only scales within
  `QUALITY_TOLERANCE` of the greatest are tried exactly as in ggml; rounding moves a value by less than half of that.

The arguments ``neighbors`` are a `quantforge.packers.lattices.points.NeighborLists`. Read `search_magnitudes` first.
"""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import (
    LANE_INDICES,
    MAX_FLOAT32,
    argmin_lane,
    broadcast,
    copy,
    differ_mask,
    fill,
    first_bit,
    inlined_jit,
    jit,
    lane_min,
    lane_sum,
    last_bit,
    less_mask,
    load,
    multiply_add,
    select_if_less,
    store,
    vector_max,
    vector_min,
)

# Which points are chosen again with the best scale: all, those off the grid, or all if any is off the grid.
SNAP_ALL, SNAP_OFF_GRID, SNAP_ALL_IF_ANY = range(3)
# Candidates on either side, whether they start from a fitted scale, which points are chosen again; then the difference
# of two candidates, the smallest maximum of a group that is not empty, and the factor of the unit.
SEARCH_OPTIONS = {
    "iq2_xxs": ((6, True, SNAP_ALL), (0.1, 1e-15, 1.0)),
    "iq2_xs": ((9, False, SNAP_OFF_GRID), (0.1, 1e-15, 1.0)),
    "iq2_s": ((9, False, SNAP_OFF_GRID), (0.1, 1e-8, 0.9875)),
    "iq3_xxs": ((15, False, SNAP_OFF_GRID), (0.2, 1e-8, 1.0125)),
    "iq3_s": ((9, False, SNAP_ALL_IF_ANY), (0.2, 1e-45, 1.033)),
}
KEY_STRIDE = 48  # array elements per part; its keys start at the ninth
QUALITY_TOLERANCE = 2e-5  # relative
# Relative to the largest distance: more than the difference that rounding makes between two ways of computing it.
DISTANCE_TOLERANCE = numpy.float32(256 * 2.0**-24)
# Outside of these scales and margins, numbers could leave the range in which that holds.
MIN_SCALE, MIN_MARGIN, MAX_MARGIN = numpy.float32(1e-10), numpy.float32(1e-30), numpy.float32(1e10)
_MIN_SUM, _MAX_SUM = numpy.float32(1e-14), numpy.float32(1e14)
_EPSILON = numpy.float32(1e-15)
# Adding and subtracting it rounds to an integer, halves to even
_MAGIC = numpy.float32(1.5 * 2**23)
_ZERO, _HALF, _ONE = numpy.float32(0), numpy.float32(0.5), numpy.float32(1)
_TENTH, _EIGHT, _COLUMNS = numpy.float32(0.1), numpy.float32(8), numpy.float32(256)


@jit
def compute_error_weights(x, importance, double_mean, mean_share, out):  # type: ignore[no-untyped-def]
    """Compute error weights: ``importance sqrt(mean + x^2)``, or without an importance ``mean_share * mean + x^2``.

    Args:
        x: float32 ``[blocks, 256]``.
        importance: float32 ``[blocks of a row, 256]``, or ``[0, 256]``.
        double_mean: whether the mean square of a block, summed in the order of its columns, is doubled.
        mean_share: factor of the mean if there is no importance.
        out: output, float32 ``[blocks, 256]``.
    """
    last_block, sums = len(x) - 1, numpy.empty(4, numpy.float32)
    for first in range(0, len(x), 4):  # side by side, since each sum waits for the one before
        rows = (
            first,
            min(first + 1, last_block),
            min(first + 2, last_block),
            min(first + 3, last_block),
        )
        sum0, sum1, sum2, sum3 = _ZERO, _ZERO, _ZERO, _ZERO
        for i in range(256):
            sum0 += x[rows[0], i] * x[rows[0], i]
            sum1 += x[rows[1], i] * x[rows[1], i]
            sum2 += x[rows[2], i] * x[rows[2], i]
            sum3 += x[rows[3], i] * x[rows[3], i]
        sums[0], sums[1], sums[2], sums[3] = sum0, sum1, sum2, sum3
        for block in range(first, min(first + 4, len(x))):
            square_sum, block_values, block_weights = sums[block - first], x[block], out[block]
            mean = (square_sum + square_sum if double_mean else square_sum) / _COLUMNS
            if len(importance):
                block_importance = importance[block % len(importance)]
                for i in range(256):
                    block_weights[i] = (
                        numpy.sqrt(mean + block_values[i] * block_values[i]) * block_importance[i]
                    )
            else:
                scaled_mean = mean_share * mean if mean_share > _ZERO else _ZERO
                for i in range(256):
                    block_weights[i] = scaled_mean + block_values[i] * block_values[i]


@jit
def search_magnitudes(  # type: ignore[no-untyped-def]
    x,
    w,
    layout,
    search_options,
    search_numbers,
    neighbors,
    odd_points,
    points,
    signs,
    scales,
    levels,
    units,
):
    """Choose points, signs and scales of blocks.

    Args:
        x, w: values and their weights, float32 ``[blocks, 256]``.
        layout: columns of a group; a tuple as long as a point has values (so that loops over them are unrolled); the
            number of digits.
        search_options: whether signs are even, then the integers of `SEARCH_OPTIONS`.
        search_numbers: the numbers of `SEARCH_OPTIONS`, float32.
        neighbors: `NeighborLists`.
        odd_points: the points as odd numbers, float32 ``[points, width]``.
        points: output, point indices, int32 ``[blocks, 256 / width]``.
        signs: output, uint8 ``[blocks, 32]``.
        scales, levels: output, float32 and uint8 ``[blocks, groups]``.
        units: output, float32 ``[blocks]``.
    """
    size, width = layout[0], len(layout[1])
    num_points, tries = size // width, search_options[1]
    step, min_max, unit_factor = search_numbers
    count = (2 * tries + 8) // 8 * 8
    # How many steps the largest value is tried to be.
    max_targets = numpy.empty(count, numpy.float32)
    for t in range(count):
        max_targets[t] = (
            numpy.float32(2 * layout[2] - 1) + numpy.float32(min(t - tries, tries)) * step
        )
    values, roots, weighted_x = numpy.empty((3, size), numpy.float32)
    candidate_on_grid, on_grid = numpy.empty((2, num_points), numpy.bool_)
    scale_arrays = (
        numpy.empty(count, numpy.float32),
        numpy.empty(count, numpy.float32),
        numpy.zeros(num_points * KEY_STRIDE + 8, numpy.float32),
        numpy.empty(size, numpy.float32),
        numpy.empty(128, numpy.float32),
    )
    runs = (
        numpy.empty(num_points, numpy.int64),
        numpy.empty((num_points, count), numpy.int64),
        numpy.empty((num_points, count), numpy.bool_),
    )
    sums = numpy.empty((count + 1, 2), numpy.float64)
    candidate_points = numpy.empty(num_points, numpy.int32)
    scale_scratch = (
        roots,
        weighted_x,
        candidate_on_grid,
        candidate_points,
        scale_arrays,
        runs,
        sums,
    )
    scratch = (values, numpy.empty(size, numpy.uint8), on_grid, scale_scratch)
    _quantize_blocks(
        x,
        w,
        layout,
        search_options,
        max_targets,
        (min_max, unit_factor),
        neighbors,
        odd_points,
        points,
        signs,
        scales,
        levels,
        units,
        scratch,
    )


@inlined_jit
def _quantize_blocks(  # type: ignore[no-untyped-def]
    x,
    w,
    layout,
    search_options,
    max_targets,
    group_limits,
    neighbors,
    odd_points,
    points,
    signs,
    scales,
    levels,
    units,
    scratch,
):
    min_max, unit_factor = group_limits
    size, points_per_group = layout[0], layout[0] // len(layout[1])
    for block in range(len(x)):
        max_scale = _ZERO
        for group in range(256 // size):
            columns = slice(group * size, group * size + size)
            indices = slice(group * points_per_group, group * points_per_group + points_per_group)
            sign_mask = signs[block, group * size // 8 : (group + 1) * size // 8]
            scales[block, group] = _quantize_group(
                x[block, columns],
                w[block, columns],
                layout,
                search_options,
                max_targets,
                min_max,
                neighbors,
                odd_points,
                points[block, indices],
                sign_mask,
                scratch,
            )
            max_scale = max(max_scale, scales[block, group])
        unit = max_scale / numpy.float32(31)
        units[block] = unit * unit_factor
        fill(levels[block], 0)
        if max_scale == _ZERO:
            fill(points[block], neighbors[0][0])
            fill(signs[block], 0)
            continue
        inverse = _ONE / unit
        for group in range(256 // size):
            levels[block, group] = nearest_level(inverse * scales[block, group], 15)


@inlined_jit
def _quantize_group(  # type: ignore[no-untyped-def]
    xs,
    ws,
    layout,
    search_options,
    max_targets,
    min_max,
    neighbors,
    odd_points,
    points,
    sign_mask,
    scratch,
):
    """Choose points and signs of one group and return its scale."""
    size, _, base = layout
    even_signs, tries, fit_positive, snap_mode = search_options
    values, codes, on_grid, scale_scratch = scratch
    roots, weighted_x, (inverses, scales, _, _, _) = (
        scale_scratch[0],
        scale_scratch[1],
        scale_scratch[4],
    )
    max_odd = numpy.float32(2 * base - 1)
    for first in range(0, size, 8):
        sign_mask[first // 8] = split_signs(xs, ws, first, even_signs, values)
    fill(points, neighbors[0][0])
    max_value = values[0]
    for i in range(size):
        max_value = max(max_value, values[i])
    for i in range(size):
        roots[i] = numpy.sqrt(ws[i])
        weighted_x[i] = ws[i] * values[i]
    start_value = max_value
    if max_value >= min_max and fit_positive:
        start_value = _positive_scale(values, ws, base + 1, codes) * numpy.float32(base)
    if max_value < min_max or start_value <= _ZERO:
        fill(sign_mask, 0)
        return _ZERO
    scale = start_value / numpy.float32(base) if fit_positive else max_value / max_odd
    fill(on_grid, snap_mode != SNAP_ALL_IF_ANY)
    count = 2 * tries + 1
    for t in range(0, len(scales), 8):
        inverse = load(max_targets, t) / broadcast(start_value)
        store(inverses, t, inverse)
        store(scales, t, broadcast(_ONE) / inverse)
    scale = _best_scale(
        values, ws, layout, count, neighbors, odd_points, scale, points, on_grid, scale_scratch
    )
    any_off_grid = snap_mode == SNAP_ALL
    for point_index in range(len(points)):
        any_off_grid |= not on_grid[point_index]
    if scale > _ZERO and any_off_grid:
        if snap_mode != SNAP_OFF_GRID:
            fill(on_grid, False)
        _snap_to_points(values, roots, layout, scale, neighbors, points, on_grid)
        product, square = _fit_sums(weighted_x, ws, points, odd_points, layout[1])
        if square > _ZERO:
            scale = product / square
    if scale < _ZERO:
        scale = -scale
        for i in range(size // 8):
            sign_mask[i] ^= 255
    return scale


@inlined_jit
def split_signs(x, w, first, even_signs, magnitudes):  # type: ignore[no-untyped-def]
    """Write the magnitudes of 8 values from index ``first`` and return the bit mask of the negative ones.

    With ``even_signs`` the number of negative signs must be even: if it is odd, the value with the lowest cost keeps a
    wrong sign, and its magnitude becomes negative.
    """
    value, zero = load(x, first), broadcast(_ZERO)
    store(magnitudes, first, select_if_less(value, zero, zero - value, value))
    mask = less_mask(value, zero)
    parity = mask ^ mask >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    if even_signs and parity & 1:
        cheapest, _ = argmin_lane(load(w, first) * value * value, load(LANE_INDICES, 0))
        magnitudes[first + cheapest] = -magnitudes[first + cheapest]
        mask ^= 1 << cheapest
    return mask


@inlined_jit
def _round_even(value):  # type: ignore[no-untyped-def]
    """Round to the nearest integer, halves to even."""
    return (value + _MAGIC) - _MAGIC


@inlined_jit
def nearest_level(ratio, max_level):  # type: ignore[no-untyped-def]
    """Return the digit ``0..max_level`` whose odd number ``2 digit + 1`` is nearest to ``ratio``."""
    level = numpy.int32(_round_even(_HALF * (ratio - _ONE)))
    return min(max(level, 0), max_level)


@inlined_jit
def _positive_scale(x, w, max_code, digits):  # type: ignore[no-untyped-def]
    """Return the scale that ggml chooses for non-negative values [make_qp_quants]; ``digits`` is scratch space.

    Codes of negative values wrap around, as they do in ggml.
    """
    size, top_code = len(x), numpy.float32(max_code)
    max_value = _ZERO
    for i in range(size):
        max_value = max(max_value, x[i])
    if max_value < _EPSILON:
        return _ZERO
    inverse = top_code / max_value
    scale, best = _ONE / inverse, _ZERO
    for i in range(size):
        wrapped = numpy.uint8(numpy.int32(_round_even(inverse * x[i])))
        diff = x[i] - scale * numpy.float32(wrapped)
        best += w[i] * diff * diff
    for tenth in range(-4, 5):
        if tenth == 0:
            continue
        candidate = (_TENTH * numpy.float32(tenth) + top_code) / max_value
        scale, error = _ONE / candidate, _ZERO
        for i in range(size):
            diff = x[i] - scale * min(top_code, _round_even(candidate * x[i]))
            error += w[i] * diff * diff
        if error < best:
            best, inverse = error, candidate
    product, square = _ZERO, _ZERO
    for i in range(size):
        code = min(top_code, _round_even(inverse * x[i]))
        digits[i] = numpy.uint8(numpy.int32(code))
        product += w[i] * x[i] * code
        square += w[i] * code * code
    for _ in range(5):
        is_changed = False
        for i in range(size):
            old_digit = numpy.float32(digits[i])
            new_product, new_square = (
                product - w[i] * x[i] * old_digit,
                square - w[i] * old_digit * old_digit,
            )
            if not (new_product > _ZERO and new_square > _ZERO):
                continue
            new_digit = min(top_code, _round_even(x[i] * new_square / new_product))
            if new_digit == old_digit:
                continue
            new_product += w[i] * x[i] * new_digit
            new_square += w[i] * new_digit * new_digit
            if new_product * new_product * square > product * product * new_square:
                digits[i] = numpy.uint8(numpy.int32(new_digit))
                product, square, is_changed = new_product, new_square, True
        if not is_changed:
            break
    return product / square if square > _ZERO else _ZERO


@inlined_jit
def _best_scale(values, w, layout, count, neighbors, odd_points, scale, points, on_grid, scratch):  # type: ignore[no-untyped-def]
    """Return the best scale, and fill in its points and which of them are on the grid."""
    roots, weighted_x, candidate_on_grid, candidate_points, scale_arrays, runs, sums = scratch
    num_points, abs_sum = len(points), _ZERO
    for i in range(len(values)):
        abs_sum += abs(weighted_x[i])
    start_bits = _find_runs(
        values, w, roots, weighted_x, layout, count, neighbors, odd_points, scale_arrays, runs, sums
    )
    min_quality, best = _min_quality(sums, start_bits, abs_sum), _ZERO
    while start_bits:  # other scales have the points of the one before
        t = first_bit(start_bits)
        start_bits &= start_bits - 1
        if sums[t, 0] * sums[t, 0] < min_quality * sums[t, 1]:
            continue
        _points_at_scale(runs, num_points, t, candidate_points, candidate_on_grid)
        product, square = _fit_sums(weighted_x, w, candidate_points, odd_points, layout[1])
        if square > _ZERO and product * product > best * square:
            scale = product / square
            best = scale * product
            copy(points, candidate_points)
            copy(on_grid, candidate_on_grid)
    return scale


@inlined_jit
def _fit_sums(weighted_x, w, points, odd_points, lanes):  # type: ignore[no-untyped-def]
    """Return ``sum w x q`` and ``sum w q^2`` for given points."""
    product, square, width = _ZERO, _ZERO, len(lanes)
    for point_index in range(len(points)):
        for i in range(width):
            q = odd_points[points[point_index], i]
            product += weighted_x[point_index * width + i] * q
            square += w[point_index * width + i] * q * q
    return product, square


# Runs of scales


@inlined_jit
def _find_runs(  # type: ignore[no-untyped-def]
    values, w, roots, weighted_x, layout, count, neighbors, odd_points, scratch, runs, sums
):
    """Find all parts' runs of scales and the changes of the sums; return a bit mask of the scales that start a run."""
    size, lanes, base = layout
    inverses, scales, keys, linear_terms, _ = scratch
    point_of_key, run_start, run_length = neighbors[0], neighbors[1], neighbors[2]
    part_starts, width, start_bits = runs[0], len(lanes), numpy.int64(0)
    _find_keys(values, size, lanes, base, inverses, count, keys)
    for t in range(count + 1):
        sums[t, 0] = sums[t, 1] = 0.0
    max_step = scales[0] * numpy.float32(2 * base - 1)
    for first in range(0, size, 8):
        doubled = load(roots, first) * load(values, first)
        store(linear_terms, first, doubled + doubled)
    for point_index in range(size // width):
        first, error_bound = point_index * width, _ZERO
        for i in range(first, first + width):
            error_bound += roots[i] * (values[i] * values[i] + max_step * max_step)
        part_starts[point_index] = 0
        bits = _key_changes(keys, point_index, count)
        while bits:
            start = first_bit(bits)
            bits &= bits - 1
            last = (first_bit(bits) if bits else count) - 1
            key = int(keys[point_index * KEY_STRIDE + 8 + start])
            point = point_of_key[key]
            if point >= 0:
                _add_run(
                    runs,
                    point_index,
                    start,
                    last + 1,
                    point,
                    True,
                    sums,
                    weighted_x,
                    w,
                    odd_points,
                    lanes,
                )
            else:
                _add_runs_off_grid(
                    run_start[key],
                    run_length[key],
                    start,
                    last,
                    point_index,
                    error_bound * DISTANCE_TOLERANCE,
                    values,
                    roots,
                    layout,
                    neighbors,
                    odd_points,
                    scratch,
                    runs,
                    sums,
                    weighted_x,
                    w,
                )
        start_bits |= part_starts[point_index]
    return start_bits


@inlined_jit
def _find_keys(values, size, lanes, base, inverses, count, keys):  # type: ignore[no-untyped-def]
    """Compute the keys of all parts for all scales."""
    one, half, magic, zero = broadcast(_ONE), broadcast(_HALF), broadcast(_MAGIC), broadcast(_ZERO)
    width = len(lanes)
    top_digit = broadcast(numpy.float32(base - 1))
    for point_index in range(size // width):
        for first in range(0, count, 8):
            inverse, key, power = load(inverses, first), zero, one
            for i in range(point_index * width, point_index * width + width):
                digit = half * (inverse * broadcast(values[i]) - one)
                digit = vector_min(vector_max((digit + magic) - magic, zero), top_digit)
                key += power * digit
                power = power * broadcast(numpy.float32(base))
            store(keys, point_index * KEY_STRIDE + 8 + first, key)


@inlined_jit
def _key_changes(keys, point_index, count):  # type: ignore[no-untyped-def]
    """Return a bit mask of the scales whose key differs from that of the scale before; the first scale is included."""
    bits = numpy.int64(1)
    for first in range(0, count, 8):
        index = point_index * KEY_STRIDE + 8 + first
        bits |= differ_mask(load(keys, index), load(keys, index - 1)) << first
    return (bits | 1) & ((numpy.int64(1) << count) - 1)


@inlined_jit
def _add_run(  # type: ignore[no-untyped-def]
    runs,
    point_index,
    first_scale,
    end_scale,
    point,
    on_grid,
    sums,
    weighted_x,
    w,
    odd_points,
    lanes,
):
    """Record a run of scales with one point; add its sums where it starts and subtract them where it ends."""
    part_starts, points, run_on_grid = runs
    first, product, square = point_index * len(lanes), _ZERO, _ZERO
    part_starts[point_index] |= numpy.int64(1) << first_scale
    points[point_index, first_scale], run_on_grid[point_index, first_scale] = point, on_grid
    if len(lanes) == 8:
        value = load(odd_points, 8 * point)
        product = lane_sum(load(weighted_x, first) * value)
        square = lane_sum(load(w, first) * value * value)
    else:
        for i in range(len(lanes)):
            q = odd_points[point, i]
            product += weighted_x[first + i] * q
            square += w[first + i] * q * q
    sums[first_scale, 0] += product
    sums[first_scale, 1] += square
    sums[end_scale, 0] -= product
    sums[end_scale, 1] -= square


@inlined_jit
def _add_runs_off_grid(  # type: ignore[no-untyped-def]
    run_start,
    length,
    first_scale,
    last_scale,
    part_index,
    margin,
    values,
    roots,
    layout,
    neighbors,
    odd_points,
    scratch,
    runs,
    sums,
    weighted_x,
    w,
):
    """Record the runs of nearest points within a run of scales whose key is not a point."""
    neighbor_digits, point_index = neighbors[3], neighbors[4]
    _, scales, _, linear_terms, terms = scratch
    lanes = layout[1]
    first, digits_start = part_index * len(lanes), run_start * len(lanes)
    is_measured = length <= 64 and MIN_MARGIN < margin < MAX_MARGIN
    is_measured &= scales[-1] > MIN_SCALE and scales[0] < _ONE / MIN_SCALE
    if is_measured:
        _measure_points(
            neighbor_digits, digits_start, length, linear_terms, roots, first, lanes, terms
        )
    while first_scale <= last_scale:
        end_scale, nearest = first_scale, -1
        if is_measured:
            nearest = _clearly_nearest(terms, length, scales[first_scale], margin)
        if nearest < 0:
            nearest = _nearest_point(
                neighbor_digits,
                digits_start,
                length,
                scales[first_scale],
                values,
                roots,
                first,
                lanes,
            )
        else:
            end_scale = last_scale
            while (
                end_scale > first_scale
                and _clearly_nearest(terms, length, scales[end_scale], margin) != nearest
            ):
                end_scale = (first_scale + end_scale) >> 1
        _add_run(
            runs,
            part_index,
            first_scale,
            end_scale + 1,
            point_index[run_start + nearest],
            False,
            sums,
            weighted_x,
            w,
            odd_points,
            lanes,
        )
        first_scale = end_scale + 1


@inlined_jit
def _min_quality(sums, start_bits, abs_sum):  # type: ignore[no-untyped-def]
    """Accumulate the sums; return the smallest ``product^2 / square`` to try. ``abs_sum`` is the sum of ``|w x|``."""
    best_product, best_square, product, square = 0.0, 1.0, 0.0, 0.0
    while start_bits:
        t = first_bit(start_bits)
        start_bits &= start_bits - 1
        product += sums[t, 0]
        square += sums[t, 1]
        sums[t, 0], sums[t, 1] = product, square
        squared = product * product
        if squared * best_square > best_product * square:
            best_product, best_square = squared, square
    in_range = min(abs_sum, best_square) > _MIN_SUM and max(abs_sum, best_square) < _MAX_SUM
    is_reliable = best_product > 0.25 * abs_sum * abs_sum
    return (
        best_product / best_square * (1 - QUALITY_TOLERANCE) if in_range and is_reliable else -1.0
    )


@inlined_jit
def _points_at_scale(runs, num_points, t, points, on_grid):  # type: ignore[no-untyped-def]
    """Fill in the points of all parts for scale ``t``, and which of them are on the grid."""
    part_starts, run_points, run_on_grid = runs
    earlier_bits = (numpy.int64(2) << t) - 1
    for point_index in range(num_points):
        start = last_bit(part_starts[point_index] & earlier_bits)
        points[point_index], on_grid[point_index] = (
            run_points[point_index, start],
            run_on_grid[point_index, start],
        )


# The nearest of a few points: 8 are measured side by side; of equally near points the first


@inlined_jit
def _snap_to_points(values, roots, layout, scale, neighbors, points, skip_part):  # type: ignore[no-untyped-def]
    """Choose the points nearest to ``values`` at ``scale``, except for the parts in ``skip_part``."""
    point_of_key = neighbors[0]
    run_start = neighbors[1]
    run_length = neighbors[2]
    neighbor_digits = neighbors[3]
    point_index = neighbors[4]
    size, lanes, base = layout
    inverse, width = _ONE / scale, len(lanes)
    for part in range(size // width):
        if skip_part[part]:
            continue
        first, key, power = part * width, 0, 1
        for i in range(first, first + width):
            key += power * nearest_level(inverse * values[i], base - 1)
            power *= base
        points[part] = point_of_key[key]
        if points[part] < 0:
            points_start, num_points = run_start[key], run_length[key]
            nearest = _nearest_point(
                neighbor_digits,
                points_start * width,
                num_points,
                scale,
                values,
                roots,
                first,
                lanes,
            )
            points[part] = point_index[points_start + nearest]


@inlined_jit
def _nearest_point(neighbor_digits, digits_start, num_points, scale, x, w, first_value, lanes):  # type: ignore[no-untyped-def]
    """Return which of ``num_points`` neighbors is nearest to the values from index ``first_value``.

    The digits of the neighbors start at ``digits_start``; of equally near points the first is returned.
    """
    scales, indices, padded_points = broadcast(scale), load(LANE_INDICES, 0), (num_points + 7) & -8
    best_distance, best_index = broadcast(MAX_FLOAT32), indices
    for point in range(digits_start, digits_start + num_points, 8):
        difference = scales * load(neighbor_digits, point) - broadcast(x[first_value])
        distance = broadcast(w[first_value]) * difference * difference
        for i in range(1, len(lanes)):
            difference = scales * load(neighbor_digits, point + i * padded_points) - broadcast(
                x[first_value + i]
            )
            distance += broadcast(w[first_value + i]) * difference * difference
        best_index = select_if_less(distance, best_distance, indices, best_index)
        best_distance = vector_min(distance, best_distance)
        indices += broadcast(_EIGHT)
    return argmin_lane(best_distance, best_index)[0]


@inlined_jit
def point_sums(  # type: ignore[no-untyped-def]
    neighbor_digits, digits_start, padded_points, linear_terms, first_linear, w, first_value, lanes
):
    """Return two sums over the values of 8 points: ``w q^2`` and ``linear_terms q``."""
    square, product = broadcast(_ZERO), broadcast(_ZERO)
    for i in range(len(lanes)):
        q = load(neighbor_digits, digits_start + i * padded_points)
        square = multiply_add(broadcast(w[first_value + i]) * q, q, square)
        product = multiply_add(broadcast(linear_terms[first_linear + i]), q, product)
    return square, product


@inlined_jit
def _measure_points(  # type: ignore[no-untyped-def]
    neighbor_digits, digits_start, num_points, linear_terms, w, first_value, lanes, terms
):
    """Compute the two sums of ``num_points`` points, and store 8 of one and 8 of the other in turn.

    With ``linear_terms = 2 w x`` the distance at a scale is ``scale (scale w q^2 - linear_terms q)``, up to a constant
    that is the same for all points.
    """
    padded_points = (num_points + 7) & -8
    for point in range(0, num_points, 8):
        square, product = point_sums(
            neighbor_digits,
            digits_start + point,
            padded_points,
            linear_terms,
            first_value,
            w,
            first_value,
            lanes,
        )
        store(terms, 2 * point, square)
        store(terms, 2 * point + 8, product)


@inlined_jit
def _clearly_nearest(terms, num_points, scale, margin):  # type: ignore[no-untyped-def]
    """Return which of up to 64 measured points is nearer than all others by ``margin``, or -1."""
    scales, min_distance = broadcast(scale), broadcast(MAX_FLOAT32)
    for point in range(0, 2 * num_points, 16):
        min_distance = vector_min(
            scales * (scales * load(terms, point) - load(terms, point + 8)), min_distance
        )
    distance_limit, bits = broadcast(lane_min(min_distance) + margin), numpy.int64(0)
    for point in range(0, 2 * num_points, 16):
        distance = scales * (scales * load(terms, point) - load(terms, point + 8))
        bits |= less_mask(distance, distance_limit) << (point >> 1)
    bits &= (numpy.int64(2) << (num_points - 1)) - 1  # padding repeats the last point
    return first_bit(bits) if bits and not bits & (bits - 1) else -1
