"""ggml's search for IQ1_S and IQ1_M, to the last bit, in loops compiled by numba.

The digits of a point are -1, 0 and 1, all raised or lowered by an eighth (the shift). If the weights of a group are
sorted, any rounding cuts them into a run of -1, a run of 0 and a run of 1. ggml tries all pairs of cuts with all
choices of shifts and takes the one with the greatest ``product^2 / square``, where ``product = sum w x q`` and ``square
= sum w q^2``. Then the digits of each 8 weights become the nearest point, and the scale is fitted again. As in
`magnitude_loops`, sums are in ggml's order, and of equal candidates the first is taken.

*Cuts.* With prefix sums ``X`` of ``w x`` and ``W`` of ``w``, the sums of the cuts ``(i1, i2)`` with choice ``k`` of
shifts are ``p_k - X[i1] - X[i2]`` and ``q_k + C_k[i1] - E_k[i2]``, so that 8 candidates take a few instructions. These
sums are not in ggml's order: they only tell which candidates can be the best, those within `QUALITY_TOLERANCE` of the
greatest. Rounding moves a value by less than half of that, even where each candidate ties with the next one. Only these
are tried exactly as in ggml. If sums are so small or large that they could leave the range of float32, all are tried.

*Points.* Distances by sums decide where one point is nearer than all others by more than rounding; otherwise the
distances are computed in ggml's order.

The arguments ``neighbors`` are a `quantforge.packers.lattices.points.NeighborLists`. Read `search_ternary` first.
"""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import (
    LANE_INDICES,
    MAX_FLOAT32,
    argmin_lane,
    broadcast,
    fill,
    first_bit,
    inlined_jit,
    jit,
    lane_max,
    lane_sum,
    less_mask,
    load,
    select_if_less,
    store,
    vector_max,
    vector_min,
)
from quantforge.packers.lattices.magnitude_loops import (
    DISTANCE_TOLERANCE,
    MAX_MARGIN,
    MIN_MARGIN,
    MIN_SCALE,
    nearest_level,
    point_sums,
)

# The smallest maximum magnitude of a group that is not empty, and the factor of the unit.
GROUP_LIMITS = {"iq1_s": (1e-12, 1.125), "iq1_m": (1e-7, 1.1125)}
QUALITY_TOLERANCE = numpy.float32(1e-3)  # for groups of 32; half of it for groups of 16
_ZERO, _ONE, _TWO = numpy.float32(0), numpy.float32(1), numpy.float32(2)
_EIGHT, _EIGHTH = numpy.float32(8), numpy.float32(0.125)
_VALUES = (0,) * 8  # one entry per value of a point, so that loops over them are unrolled
# Shifts of the first and of the second half, for each choice.
_SHIFTS_OF_TWO = _EIGHTH * numpy.array([*[1, -1] * 4, *[1, -1] * 4], numpy.float32)
_SHIFTS_OF_FOUR = _EIGHTH * numpy.array([*[1, 1, -1, -1] * 2, *[1, -1, 1, -1] * 2], numpy.float32)
_MIN_SUM, _MAX_SUM = numpy.float32(1e-14), numpy.float32(1e14)


@jit
def search_ternary(  # type: ignore[no-untyped-def]
    x,
    w,
    size,
    skip_refit,
    min_magnitude,
    unit_factor,
    neighbors,
    points,
    codes,
    lowered,
    levels,
    units,
):
    """Choose points, shifts and scales of blocks.

    Args:
        x, w: values and their weights, float32 ``[blocks, 256]``.
        size: columns of a group: 32 with one shift, 16 with one for each 8.
        skip_refit: whether scales and units are not fitted again after points are chosen.
        min_magnitude: a group whose largest magnitude is smaller is empty.
        unit_factor: factor that the unit is multiplied with.
        neighbors: `NeighborLists`.
        points: float32 ``[points, 8]``.
        codes: output, int32 ``[blocks, 32]``.
        lowered: output, bool ``[blocks, 32]``.
        levels: output, uint8 ``[blocks, groups]``.
        units: output, float32 ``[blocks]``.
    """
    sums = (numpy.empty(size + 1, numpy.float32), numpy.empty(size + 1, numpy.float32))
    product_terms, square_terms = numpy.empty((2, 4 * size + 16), numpy.float32)
    first_cut_squares, best_by_cut = numpy.empty((2, 8 * size + 8), numpy.float32)
    order, digits = numpy.empty(size, numpy.int64), numpy.empty(size, numpy.int64)
    ranks = numpy.empty(size, numpy.float32)
    terms = numpy.empty(16, numpy.float32)
    scratch = (
        order,
        digits,
        ranks,
        (sums, product_terms, square_terms, first_cut_squares, best_by_cut),
        terms,
    )
    scales = numpy.empty(256 // size, numpy.float32)
    _quantize_blocks(
        x,
        w,
        size,
        skip_refit,
        min_magnitude,
        unit_factor,
        neighbors,
        points,
        codes,
        lowered,
        levels,
        units,
        scales,
        scratch,
    )


@inlined_jit
def _quantize_blocks(  # type: ignore[no-untyped-def]
    x,
    w,
    size,
    skip_refit,
    min_magnitude,
    unit_factor,
    neighbors,
    points,
    codes,
    lowered,
    levels,
    units,
    scales,
    scratch,
):
    groups, points_per_group, terms = 256 // size, size // 8, scratch[4]
    for block in range(len(x)):
        max_scale = _ZERO
        for group in range(groups):
            columns = slice(group * size, (group + 1) * size)
            indices = slice(group * points_per_group, (group + 1) * points_per_group)
            scales[group] = _quantize_group(
                x[block, columns],
                w[block, columns],
                skip_refit,
                min_magnitude,
                neighbors,
                points,
                lowered[block, indices],
                codes[block, indices],
                scratch,
            )
            max_scale = max(max_scale, scales[group])
        fill(levels[block], 0)
        units[block] = _ZERO
        if max_scale == _ZERO:
            fill(codes[block], 0)
            fill(lowered[block], False)
            continue
        unit = max_scale / numpy.float32(15)
        inverse = _ONE / unit
        for group in range(groups):
            levels[block, group] = nearest_level(inverse * scales[group], 7)
        if size == 16 and not skip_refit:
            unit = _fit_unit(
                x[block], w[block], codes[block], lowered[block], levels[block], unit, points, terms
            )
        units[block] = unit * unit_factor


@inlined_jit
def _quantize_group(  # type: ignore[no-untyped-def]
    xs, ws, skip_refit, min_magnitude, neighbors, points, lowered, point_indices, scratch
):
    """Choose points and shifts of one group and return its scale."""
    size = len(xs)
    order, digits, ranks, cut_scratch, terms = scratch
    fill(lowered, False)
    fill(point_indices, 0)
    if _largest_magnitude(xs) < min_magnitude:
        return _ZERO
    sorted_order(xs, order, ranks)
    if size == 32:
        scale, first_cut, second_cut, choice = find_cuts(xs, ws, order, 2, cut_scratch)
        fill(lowered, choice == 1)
    else:
        scale, first_cut, second_cut, choice = find_cuts(xs, ws, order, 4, cut_scratch)
        lowered[0], lowered[1] = choice >> 1 & 1, choice & 1
    if first_cut < 0:
        fill(lowered, False)
        return _ZERO
    for j in range(size):
        digit = 0 if j < first_cut else 1 if j < second_cut else 2
        digits[order[j]] = digit if scale >= _ZERO else 2 - digit
    if scale < _ZERO:
        scale = -scale
        for vector in range(len(lowered)):
            lowered[vector] = not lowered[vector]
    return (
        scale
        if skip_refit
        else _snap_to_points(
            xs, ws, scale, digits, lowered, neighbors, points, point_indices, terms
        )
    )


@inlined_jit
def _largest_magnitude(x):  # type: ignore[no-untyped-def]
    max_magnitude = _ZERO
    for i in range(len(x)):
        max_magnitude = max(max_magnitude, abs(x[i]))
    return max_magnitude


@inlined_jit
def _snap_to_points(x, w, scale, digits, lowered, neighbors, points, point_indices, terms):  # type: ignore[no-untyped-def]
    """Choose the points nearest to ``digits``, and return the scale that fits them; ``lowered`` has their shifts."""
    point_of_key = neighbors[0]
    run_start = neighbors[1]
    run_length = neighbors[2]
    neighbor_digits = neighbors[3]
    point_index = neighbors[4]
    any_off_grid = False
    for vector in range(len(x) // 8):
        key, power = 0, 1
        for i in range(8):
            key += power * digits[8 * vector + i]
            power *= 3
        point_indices[vector] = point_of_key[key]
        if point_indices[vector] < 0:
            any_off_grid = True
            shift = -_EIGHTH if lowered[vector] else _EIGHTH
            points_start, num_points = run_start[key], run_length[key]
            nearest = _nearest_point(
                neighbor_digits, points_start * 8, num_points, scale, shift, x, w, 8 * vector, terms
            )
            point_indices[vector] = point_index[points_start + nearest]
    if not any_off_grid:
        return scale
    product, square = _ZERO, _ZERO
    for vector in range(len(x) // 8):
        value = load(points, 8 * point_indices[vector]) + broadcast(
            -_EIGHTH if lowered[vector] else _EIGHTH
        )
        product, square = _add_products(x, w, 8 * vector, value, terms, product, square)
    return product / square if product > _ZERO and square > _ZERO else scale


@inlined_jit
def _fit_unit(x, w, codes, lowered, levels, unit, points, terms):  # type: ignore[no-untyped-def]
    """Return the unit that best fits a block with chosen points and levels."""
    product, square = _ZERO, _ZERO
    for vector in range(32):
        odd_level = broadcast(numpy.float32(2 * numpy.int32(levels[vector // 2]) + 1))
        shift = broadcast(-_EIGHTH if lowered[vector] else _EIGHTH)
        value = (load(points, 8 * codes[vector]) + shift) * odd_level
        product, square = _add_products(x, w, 8 * vector, value, terms, product, square)
    return product / square if square > _ZERO else unit


@inlined_jit
def _add_products(x, w, first, value, terms, product, square):  # type: ignore[no-untyped-def]
    """Add ``w x q`` and ``w q^2`` of 8 values to the two sums, one value after another; ``terms`` is scratch space."""
    weighted = load(w, first) * value
    store(terms, 0, weighted * load(x, first))
    store(terms, 8, weighted * value)
    for i in range(8):
        product += terms[i]
        square += terms[8 + i]
    return product, square


# Cuts of a sorted group


@inlined_jit
def find_cuts(x, w, order, num_choices, scratch):  # type: ignore[no-untyped-def]
    """Return the scale, the two cuts and the choice of shifts of the best candidate; cuts are -1 if there is none.

    ``num_choices`` is 2 for one shift (choice 1: lowered), 4 for two halves with a shift each (two bits, the first half
    in the upper one).
    """
    size = len(x)
    sums, product_terms, square_terms, first_cut_squares, best_by_cut = scratch
    in_range = _prepare_sums(
        x, w, order, num_choices, sums, product_terms, square_terms, first_cut_squares
    )
    num_candidates, best_quality = (size + 1) * num_choices, broadcast(_ZERO)
    for first_cut in range(size + 1):
        prefix_x = broadcast(sums[0][first_cut])
        prefix_square = load(first_cut_squares, first_cut * 8)
        row_best = broadcast(_ZERO)
        for index in range(first_cut * num_choices, num_candidates, 8):
            row_best = vector_max(
                _quality(product_terms, square_terms, index, prefix_x, prefix_square), row_best
            )
        store(best_by_cut, first_cut * 8, row_best)
        best_quality = vector_max(row_best, best_quality)
    min_quality = lane_max(best_quality) * (
        _ONE - QUALITY_TOLERANCE * numpy.float32(size) / numpy.float32(32)
    )
    quality_limits = broadcast(min_quality if in_range else -MAX_FLOAT32)
    best, scale, best_first, best_second, best_choice = -MAX_FLOAT32, _ZERO, -1, -1, -1
    for first_cut in range(size + 1):
        if in_range and not less_mask(quality_limits, load(best_by_cut, first_cut * 8)):
            continue
        prefix_x = broadcast(sums[0][first_cut])
        prefix_square = load(first_cut_squares, first_cut * 8)
        for start in range(first_cut * num_choices, num_candidates, 8):
            bits = numpy.int64(255)
            if in_range:
                bits = less_mask(
                    quality_limits,
                    _quality(product_terms, square_terms, start, prefix_x, prefix_square),
                )
            while bits:
                index = start + first_bit(bits)
                bits &= bits - 1
                if index >= num_candidates:
                    break
                second_cut, choice_index = index // num_choices, index % num_choices
                if num_choices == 2:
                    product, square = _sums_of_group(sums, first_cut, second_cut, choice_index)
                else:
                    product, square = _sums_of_halves(
                        x, w, order, first_cut, second_cut, choice_index
                    )
                if square > _ZERO and product * product > best * square:
                    scale = product / square
                    best = scale * product
                    best_first, best_second, best_choice = first_cut, second_cut, choice_index
    return scale, best_first, best_second, best_choice


@inlined_jit
def sorted_order(x, order, ranks):  # type: ignore[no-untyped-def]
    """Fill ``order`` with the indices that sort ``x``; equal values keep their order."""
    size, one, zero = len(x), broadcast(_ONE), broadcast(_ZERO)
    for first in range(0, size, 8):
        chunk, rank = load(x, first), zero
        for j in range(size):
            rank += select_if_less(broadcast(x[j]), chunk, one, zero)
        store(ranks, first, rank)
    fill(order, -1)
    for i in range(size):
        position = int(ranks[i])
        while order[position] >= 0:  # an equal value before it
            position += 1
        order[position] = i


@inlined_jit
def _prepare_sums(x, w, order, num_choices, sums, product_terms, square_terms, first_cut_squares):  # type: ignore[no-untyped-def]
    """Compute the terms of the two sums of all candidates, and the prefix sums; return whether these are in range.

    Lanes are choices, repeated; lanes after the last cut repeat it.
    """
    size, half = len(x), len(x) // 2
    prefix_x, prefix_w = sums
    total_x, total_w, half_x, half_w, abs_sum = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
    prefix_x[0], prefix_w[0] = _ZERO, _ZERO
    for j in range(size):
        i = order[j]
        weighted = w[i] * x[i]
        total_x += weighted
        total_w += w[i]
        prefix_x[j + 1], prefix_w[j + 1] = total_x, total_w
        abs_sum += abs(weighted)
        if i >= half:
            half_x += weighted
            half_w += w[i]
    one, two = broadcast(_ONE), broadcast(_TWO)
    shifts = _SHIFTS_OF_TWO if num_choices == 2 else _SHIFTS_OF_FOUR
    low, high = load(shifts, 0), load(shifts, 8)
    shifted_products = (
        broadcast(total_x) + low * broadcast(total_x - half_x) + high * broadcast(half_x)
    )
    low_square, high_square = (one + low) * (one + low), (one + high) * (one + high)
    shifted_squares = low_square * broadcast(total_w - half_w) + high_square * broadcast(half_w)
    low, high, shift_terms = two * low, two * high, broadcast(_ZERO)
    for j in range(size + 1):
        weight_sum = broadcast(prefix_w[j])
        store(product_terms, j * num_choices, shifted_products - broadcast(prefix_x[j]))
        store(square_terms, j * num_choices, shifted_squares - (weight_sum + shift_terms))
        store(first_cut_squares, j * 8, weight_sum - shift_terms)
        if j < size:
            i = order[j]
            shift_terms += (low if i < half else high) * broadcast(w[i])
    return min(abs_sum, total_w) > _MIN_SUM and max(abs_sum, total_w) < _MAX_SUM


@inlined_jit
def _quality(product_terms, square_terms, index, prefix_x, prefix_square):  # type: ignore[no-untyped-def]
    product = load(product_terms, index) - prefix_x
    return product * product / (load(square_terms, index) + prefix_square)


@inlined_jit
def _sums_of_group(sums, first_cut, second_cut, choice):  # type: ignore[no-untyped-def]
    """Return ggml's two sums for a pair of cuts of a whole group with one shift."""
    prefix_x, prefix_w = sums
    size = len(prefix_x) - 1
    shift = -_EIGHTH if choice else _EIGHTH
    v0, v1, v2 = shift - _ONE, shift, shift + _ONE
    low_x, low_w = prefix_x[first_cut] - prefix_x[0], prefix_w[first_cut] - prefix_w[0]
    mid_x = prefix_x[second_cut] - prefix_x[first_cut]
    mid_w = prefix_w[second_cut] - prefix_w[first_cut]
    high_x, high_w = prefix_x[size] - prefix_x[second_cut], prefix_w[size] - prefix_w[second_cut]
    product = low_x * v0 + mid_x * v1 + high_x * v2
    return product, low_w * v0 * v0 + mid_w * v1 * v1 + high_w * v2 * v2


@inlined_jit
def _sums_of_halves(x, w, order, first_cut, second_cut, choice):  # type: ignore[no-untyped-def]
    """Return ggml's two sums for a pair of cuts of two halves with a shift each."""
    product, square, half = _ZERO, _ZERO, len(x) // 2
    for j in range(len(x)):
        i = order[j]
        is_lowered = choice >> 1 if i < half else choice & 1
        digit = _ONE if j >= second_cut else _ZERO if j >= first_cut else -_ONE
        value = digit + (-_EIGHTH if is_lowered else _EIGHTH)
        product += w[i] * value * x[i]
        square += w[i] * value * value
    return product, square


# The nearest of a few shifted points: 8 are measured side by side; of equally near points the first


@inlined_jit
def _nearest_point(  # type: ignore[no-untyped-def]
    neighbor_digits, digits_start, num_points, scale, shift, x, w, first_value, linear_terms
):
    """Return which of ``num_points`` neighbors, raised by ``shift``, is nearest to 8 values from ``first_value``.

    The digits of the neighbors start at ``digits_start``; ``linear_terms`` is scratch space.
    """
    clear_point = _clearly_nearest(
        neighbor_digits, digits_start, num_points, scale, shift, x, w, first_value, linear_terms
    )
    if clear_point >= 0:
        return clear_point
    scales, shifts, indices = broadcast(scale), broadcast(shift), load(LANE_INDICES, 0)
    padded_points = (num_points + 7) & -8
    best_distance, best_index = broadcast(MAX_FLOAT32), indices
    for point in range(digits_start, digits_start + num_points, 8):
        difference = scales * (load(neighbor_digits, point) + shifts) - broadcast(x[first_value])
        distance = broadcast(w[first_value]) * difference * difference
        for i in range(1, 8):
            difference = scales * (
                load(neighbor_digits, point + i * padded_points) + shifts
            ) - broadcast(x[first_value + i])
            distance += broadcast(w[first_value + i]) * difference * difference
        best_index = select_if_less(distance, best_distance, indices, best_index)
        best_distance = vector_min(distance, best_distance)
        indices += broadcast(_EIGHT)
    return argmin_lane(best_distance, best_index)[0]


@inlined_jit
def _clearly_nearest(  # type: ignore[no-untyped-def]
    neighbor_digits, digits_start, num_points, scale, shift, x, w, first_value, linear_terms
):
    """Return the nearest point if it is nearer than all others by more than rounding, else -1."""
    scales, weights, target = broadcast(scale), load(w, first_value), load(x, first_value)
    shifted_target = target - broadcast(scale * shift)
    store(linear_terms, 0, weights * (shifted_target + shifted_target))
    max_step = scales + scales
    margin = lane_sum(weights * (target * target + max_step * max_step)) * DISTANCE_TOLERANCE
    if not (MIN_MARGIN < margin < MAX_MARGIN and MIN_SCALE < scale < _ONE / MIN_SCALE):
        return -1
    indices, padded_points = load(LANE_INDICES, 0), (num_points + 7) & -8
    best_distance = broadcast(MAX_FLOAT32)
    second_distance = broadcast(MAX_FLOAT32)
    best_index = indices
    for nearest in range(digits_start, digits_start + num_points, 8):
        square, linear_sum = point_sums(
            neighbor_digits, nearest, padded_points, linear_terms, 0, w, first_value, _VALUES
        )
        distance = scales * (scales * square - linear_sum)
        best_index = select_if_less(distance, best_distance, indices, best_index)
        second_distance = vector_min(vector_max(distance, best_distance), second_distance)
        best_distance = vector_min(distance, best_distance)
        indices += broadcast(_EIGHT)
    nearest, min_distance = argmin_lane(best_distance, best_index)
    distance_limit = broadcast(min_distance + margin)
    bits = less_mask(best_distance, distance_limit)
    is_single = bits and not bits & (bits - 1) and not less_mask(second_distance, distance_limit)
    return nearest if is_single else -1
