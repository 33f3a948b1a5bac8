"""Find the nearest points of a lattice, and the scales that minimize the errors, compiled by numba.

There are two metrics. Both give the same answer for the same input on every processor, since sums have a fixed order:

- *Weighted squares* (`nearest_weighted`, `search_scales`). Each weight keeps its sign; where the number of negative
  signs must be even, the cheapest one is flipped. So only magnitudes are searched, 8 columns at a time: one point of 8
  values, or two of 4. The best digits of each value alone give a lower bound. If they form a point, it is the nearest;
  otherwise halves of a point's digits are searched: `quantforge.packers.lattices.points.PointHalves`, part of
  ``tables`` here, says which pairs of halves form a point. First halves that cannot win even with the best second half,
  which are most, are skipped.
- *A full metric* ``M`` (`nearest_in_metric`, for GPTQ). The score of a point ``q`` is ``q M q - 2 q M u``,
  its distance from ``u`` up to a constant. Flipping a sign can pay, so a few choices of signs are tried,
  each with all points. With signs ``S`` and magnitudes ``g`` the score is ``g (S M S) g - 2 g (S M u)``: the first part
  is the same for all rows, and is computed once for each mask of signs that occurs. Tables are stored coordinate by
  coordinate, so that 8 points are one vector instruction.

If the errors of several points differ by rounding alone, any of these may be returned.
"""

from __future__ import annotations

import numpy

from quantforge.numerics.compiled import (
    LANE_INDICES,
    MAX_FLOAT32,
    argmin_lane,
    broadcast,
    copy,
    fill,
    first_bit,
    inlined_jit,
    internal_jit,
    jit,
    lane_min,
    lane_sum,
    less_mask,
    load,
    load_column,
    select_if_less,
    store,
    vector_min,
)
from quantforge.packers.lattices.magnitude_loops import split_signs

# First points that are combined with the best second one, if two points share a code
NUM_FIRST_POINTS = 4
_ZERO, _ONE, _TWO, _EIGHT = (numpy.float32(value) for value in (0, 1, 2, 8))
# The smallest normal float16, and constants that round to float16 below and above it.
_MIN_NORMAL, _SUBNORMAL_ROUNDER = numpy.float32(2.0**-14), numpy.float32(0.75)
_SPLITTER = numpy.float32(8193)


# Weighted squares


@jit
def nearest_weighted(x, w, steps, lowered, shifts, options, tables, codes):  # type: ignore[no-untyped-def]
    """Fill in the codes of vectors of 8 weights, float32 ``[n, 8]``, with steps of the same shape or ``[n, 1]``.

    Args:
        x, w, steps: values, weights of their errors, steps.
        lowered: int64 ``[n]``, which of the shifts each vector has; empty if they have none or may choose.
        shifts: float32 ``[2, 8]``.
        options: whether there are signs, whether their number of negatives is even, and whether there are two shifts to
            choose from; bits of an index; codes of 8 weights.
        tables: a tuple with one entry per digit, the digits' values, then `PointHalves`.
        codes: output, int32 ``[n, codes]``.
    """
    targets, best_codes = numpy.empty(8, numpy.float32), numpy.zeros(2, numpy.int64)
    scratch = _make_scratch(tables[0])
    _encode_vectors(
        x, w, steps, lowered, shifts, options, tables, scratch, targets, best_codes, codes
    )


@inlined_jit
def _encode_vectors(  # type: ignore[no-untyped-def]
    x, w, steps, lowered, shifts, options, tables, scratch, targets, best_codes, codes
):
    signed, even_signs, has_two_shifts, index_bits, codes_per_vector = options
    points_per_vector = 2 if len(tables[0]) == 8 else 1
    points_per_code = points_per_vector // codes_per_vector
    sign_shift = index_bits * points_per_code
    for vector in range(len(x)):
        mask = _find_targets(x[vector], w[vector], 0, signed, even_signs, targets)
        fill(best_codes, 0)
        shift_range = (
            (lowered[vector], lowered[vector] + 1)
            if len(lowered)
            else (0, 2 if has_two_shifts else 1)
        )
        step = load(steps[vector], 0) if steps.shape[1] == 8 else broadcast(steps[vector, 0])
        _best_points(
            targets,
            w[vector],
            8,
            step,
            shifts,
            shift_range,
            tables,
            scratch,
            MAX_FLOAT32,
            best_codes,
        )
        for code in range(codes_per_vector):
            value = numpy.int64(0)
            for point in range(points_per_code):
                value |= (best_codes[code * points_per_code + point] >> 1) << point * index_bits
            if has_two_shifts:
                value |= (best_codes[0] & 1) << sign_shift
            if signed:
                value |= (
                    mask >> code * (8 // codes_per_vector) & ((1 << 8 // codes_per_vector) - 1)
                ) << sign_shift
            codes[vector, code] = value


@jit
def search_scales(x, w, options, shifts, tables, points, units, levels, lowered):  # type: ignore[no-untyped-def]
    """Improve units and levels (and shifts) of blocks, choosing all points again for each candidate.

    Args:
        x, w: values and weights of their errors, float32 ``[blocks, 256]``.
        options: whether there are signs, whether their number of negatives is even, whether each code or each group has
            two shifts; columns of a group, the largest level, the step factor, rounds.
        shifts: float32 ``[2, 8]``.
        tables: a tuple with one entry per digit, the digits' values, then `PointHalves`.
        points: float32 ``[points, width]``.
        units: float32 ``[blocks]``, improved in place, as are ``levels`` and ``lowered`` uint8 ``[blocks, groups]``.
    """
    size, width = options[4], points.shape[1]
    candidate_codes, best_codes = numpy.zeros((2, size // width), numpy.int64)
    buffers = (
        numpy.empty(256, numpy.float32),
        numpy.empty(8, numpy.float32),
        candidate_codes,
        best_codes,
    )
    scratch = _make_scratch(tables[0])
    _improve_blocks(x, w, options, shifts, tables, points, units, levels, lowered, scratch, buffers)


@inlined_jit
def _improve_blocks(  # type: ignore[no-untyped-def]
    x, w, options, shifts, tables, points, units, levels, lowered, scratch, buffers
):
    signed, even_signs, has_two_shifts, has_group_shifts, size, max_level, unit, rounds = options
    groups, width = 256 // size, points.shape[1]
    targets, scaled, candidate_codes, best_codes = buffers
    for block in range(len(x)):
        for first in range(0, 256, 8):
            _find_targets(x[block], w[block], first, signed, even_signs, targets)
        for _ in range(rounds):
            product, square = 0.0, 0.0
            for group in range(groups):
                columns = slice(group * size, group * size + size)
                group_targets, weights, best = targets[columns], w[block, columns], MAX_FLOAT32
                level, is_lowered = levels[block, group], lowered[block, group]
                fill(best_codes, 0)
                for move in range(3):
                    candidate_level = numpy.int64(level) + (move if move < 2 else -1)
                    if candidate_level < 0 or candidate_level > max_level:
                        continue
                    step = broadcast(units[block] * (numpy.float32(2 * candidate_level + 1) * unit))
                    for shift_number in range(2 if has_group_shifts else 1):
                        shift_index = numpy.int64(is_lowered) ^ shift_number
                        shift_range = (
                            (shift_index, shift_index + 1)
                            if has_group_shifts
                            else (0, 2 if has_two_shifts else 1)
                        )
                        error = _best_points(
                            group_targets,
                            weights,
                            size,
                            step,
                            shifts,
                            shift_range,
                            tables,
                            scratch,
                            best,
                            candidate_codes,
                        )
                        if error < best:
                            best = error
                            copy(best_codes, candidate_codes)
                            levels[block, group], lowered[block, group] = (
                                candidate_level,
                                shift_index,
                            )
                odd_level = 2.0 * levels[block, group] + 1
                product_sum, square_sum = _scale_moments(
                    group_targets, weights, size, shifts, points, width, best_codes, scaled
                )
                product += odd_level * product_sum
                square += odd_level * odd_level * square_sum
            if square > 0 and product > 0:
                fitted_unit = round_float16(numpy.float32(product / (square * unit)))
                units[block] = fitted_unit if fitted_unit > _ZERO else units[block]


@inlined_jit
def _scale_moments(targets, w, size, shifts, points, width, point_codes, scaled):  # type: ignore[no-untyped-def]
    """Return ``sum w q u`` and ``sum w q^2`` of a group for targets ``u`` and chosen points, in units of its step."""
    points_per_chunk, product, square = 8 // width, broadcast(_ZERO), broadcast(_ZERO)
    for chunk in range(size // 8):
        for point in range(points_per_chunk):
            if points_per_chunk == 2:
                point_index = point_codes[chunk * points_per_chunk + point] >> 1
                for i in range(4):
                    scaled[4 * point + i] = points[point_index, i]
        value = (
            load(scaled, 0)
            if points_per_chunk == 2
            else load(points, 8 * (point_codes[chunk] >> 1))
        )
        value += load(shifts, 8 * (point_codes[chunk * points_per_chunk] & 1))
        weighted = load(w, 8 * chunk) * value
        product += weighted * load(targets, 8 * chunk)
        square += weighted * value
    return lane_sum(product), lane_sum(square)


@inlined_jit
def round_float16(value):  # type: ignore[no-untyped-def]
    """Round a non-negative number within the range of float16 to float16."""
    if value < _MIN_NORMAL:
        return (value + _SUBNORMAL_ROUNDER) - _SUBNORMAL_ROUNDER
    split = _SPLITTER * value
    return split - (split - value)


@internal_jit
def _make_scratch(values):  # type: ignore[no-untyped-def]
    lanes = 96 if len(values) == 3 else 64
    sums = (numpy.empty(lanes, numpy.float32), numpy.empty(lanes, numpy.float32))
    return (
        numpy.empty(64 * len(values), numpy.float32),
        numpy.empty((3, 4, 2), numpy.float32),
        numpy.zeros((2, 4, 2), numpy.int64),
        numpy.empty(2, numpy.int64),
        sums,
    )


@inlined_jit
def _find_targets(x, w, first, signed, even_signs, targets):  # type: ignore[no-untyped-def]
    """Write the target magnitudes of 8 columns from index ``first``, and return the bit mask of negative signs."""
    if signed:
        return split_signs(x, w, first, even_signs, targets)
    store(targets, first, load(x, first))
    return numpy.int64(0)


@inlined_jit
def _best_points(targets, w, size, step, shifts, shift_range, tables, scratch, bound, point_codes):  # type: ignore[no-untyped-def]
    """Return the error of ``size`` columns with their best points, or ``bound`` if it is not smaller.

    For each 8 columns one of the shifts (float32 ``[2, 8]``) in ``shift_range`` may be chosen. ``point_codes`` is
    filled with twice the index of each point, plus 1 if the second shift was chosen.
    """
    lanes, values, half_penalties, point_of_key, powers, patterns = tables
    digit_errors, free_errors, half_keys, candidate_codes, sums = scratch
    total_error = _ZERO
    points_per_chunk = 2 if len(lanes) == 8 else 1
    errors_per_chunk = 8 * len(lanes)
    for chunk in range(size // 8):
        min_error = MAX_FLOAT32
        for shift_index in range(shift_range[0], shift_range[1]):
            error_start = (4 * shift_index + chunk) * errors_per_chunk
            first_error, second_error, first_key, second_key = _best_digits(
                targets,
                w,
                8 * chunk,
                step,
                load(shifts, 8 * shift_index),
                lanes,
                values,
                powers,
                digit_errors,
                error_start,
            )
            free_errors[shift_index, chunk, 0], free_errors[shift_index, chunk, 1] = (
                first_error,
                second_error,
            )
            half_keys[shift_index, chunk, 0], half_keys[shift_index, chunk, 1] = (
                first_key,
                second_key,
            )
            min_error = min(min_error, first_error + second_error)
        free_errors[2, chunk, 0] = min_error
        total_error += min_error
    if not total_error < bound:
        return bound
    for chunk in range(size // 8):
        min_error = free_errors[2, chunk, 0]
        chunk_bound = min_error + (bound - total_error)
        best_error = chunk_bound
        second_first = (
            shift_range[1] - shift_range[0] == 2
            and free_errors[1, chunk, 0] < free_errors[0, chunk, 0]
        )
        for order_index in range(shift_range[0], shift_range[1]):
            shift_index = 1 - order_index if second_first else order_index
            chunk_error = free_errors[shift_index, chunk, 0] + free_errors[shift_index, chunk, 1]
            for point in range(points_per_chunk):
                half_key = half_keys[shift_index, chunk, point]
                point_index = point_of_key[half_key]
                free_error = free_errors[shift_index, chunk, point]
                if point_index < 0 and chunk_error < best_error:
                    error_start = (4 * shift_index + chunk) * errors_per_chunk + 4 * point
                    point_index, error = _best_point(
                        digit_errors,
                        error_start,
                        half_key,
                        best_error - (chunk_error - free_error),
                        lanes,
                        half_penalties,
                        point_of_key,
                        patterns,
                        sums,
                    )
                    chunk_error = chunk_error - free_error + error
                candidate_codes[point] = 2 * point_index + shift_index
                if point_index < 0:
                    chunk_error = MAX_FLOAT32
            if chunk_error < best_error:
                best_error = chunk_error
                for point in range(points_per_chunk):
                    point_codes[chunk * points_per_chunk + point] = candidate_codes[point]
        if not best_error < chunk_bound:
            return bound
        total_error += best_error - min_error
    return total_error


@inlined_jit
def _best_digits(x, w, first_value, step, shift, lanes, values, powers, digit_errors, error_start):  # type: ignore[no-untyped-def]
    """Choose the best digit for each of 8 values alone, without requiring a point; values are ``step (v + shift)``.

    Return the errors of the first 4 values (of all 8 for points of 8 values) and of the others, and the positions of
    both in `PointHalves.point_of_key`. Fill ``digit_errors`` from ``error_start`` with the errors of all digits of the
    8 values, digit by digit.
    """
    chunk, weights = load(x, first_value), load(w, first_value)
    best_errors, best_digits = broadcast(MAX_FLOAT32), broadcast(_ZERO)
    for digit in range(len(lanes)):
        difference = step * (broadcast(values[digit]) + shift) - chunk
        error = weights * difference * difference
        store(digit_errors, error_start + 8 * digit, error)
        best_digits = select_if_less(
            error, best_errors, broadcast(numpy.float32(digit)), best_digits
        )
        best_errors = vector_min(error, best_errors)
    if len(lanes) == 3:
        return lane_sum(best_errors), _ZERO, int(lane_sum(best_digits * load(powers, 0))), 0
    first_errors = select_if_less(load(powers, 0), broadcast(_ONE), broadcast(_ZERO), best_errors)
    return (
        lane_sum(first_errors),
        lane_sum(best_errors - first_errors),
        int(lane_sum(best_digits * load(powers, 0))),
        int(lane_sum(best_digits * load(powers, 8))),
    )


@inlined_jit
def _best_point(  # type: ignore[no-untyped-def]
    digit_errors, first_value, half_key, bound, lanes, half_penalties, point_of_key, patterns, sums
):
    """Return the point with the smallest error, and that error; -1 if none is below ``bound``.

    ``lanes`` is a tuple with one entry per digit, so that loops are unrolled; ``digit_errors`` and ``half_key`` come
    from `_best_digits`, and ``first_value`` is the position of the first value in ``digit_errors``.
    """
    first_sums, second_sums = sums
    count = 96 if len(lanes) == 3 else 64
    start_half, start_second = half_key // count, half_key % count
    if len(lanes) == 3:
        for chunk in range(0, 32, 8):
            sums_of_three = _sum_three_digits(digit_errors, first_value + 4, patterns, chunk)
            for digit in range(3):
                store(
                    second_sums,
                    32 * digit + chunk,
                    sums_of_three + broadcast(digit_errors[8 * digit + first_value + 7]),
                )
    else:
        first_column = load_column(digit_errors, first_value + 2)
        for digit in range(8):
            store(
                second_sums,
                8 * digit,
                first_column + broadcast(digit_errors[8 * digit + first_value + 3]),
            )
    second_error = second_sums[start_second]
    if len(lanes) == 3:
        start_error = digit_errors[8 * (start_half // 32) + first_value + 3]
        remaining = start_half % 32
        for i in range(3):
            start_error, remaining = (
                start_error + digit_errors[8 * (remaining % 3) + first_value + i],
                remaining // 3,
            )
    else:
        start_error = (
            digit_errors[8 * (start_half % 8) + first_value]
            + digit_errors[8 * (start_half // 8) + first_value + 1]
        )
    best_error = min(
        start_error + _best_second_half(second_sums, half_penalties, start_half, count), bound
    )
    best_half = (start_half, start_error)
    if len(lanes) == 3:
        for chunk in range(0, 32, 8):
            sums_of_three = _sum_three_digits(digit_errors, first_value, patterns, chunk)
            for digit in range(3):
                summed = sums_of_three + broadcast(digit_errors[8 * digit + first_value + 3])
                best_half, best_error = _try_first_halves(
                    summed,
                    32 * digit + chunk,
                    second_error,
                    start_half,
                    best_half,
                    best_error,
                    first_sums,
                    second_sums,
                    half_penalties,
                    count,
                )
    else:
        first_column = load_column(digit_errors, first_value)
        for digit in range(8):
            summed = first_column + broadcast(digit_errors[8 * digit + first_value + 1])
            best_half, best_error = _try_first_halves(
                summed,
                8 * digit,
                second_error,
                start_half,
                best_half,
                best_error,
                first_sums,
                second_sums,
                half_penalties,
                count,
            )
    if not best_error < bound:
        return -1, bound
    first_half, first_error = best_half
    for chunk in range(0, count, 8):
        total_error = broadcast(first_error) + (
            load(second_sums, chunk) + load(half_penalties, first_half * count + chunk)
        )
        bits = less_mask(broadcast(best_error), total_error) ^ 255
        if bits:
            return point_of_key[first_half * count + chunk + first_bit(bits)], best_error
    return -1, bound


@inlined_jit
def _sum_three_digits(digit_errors, first_value, patterns, chunk):  # type: ignore[no-untyped-def]
    """Return the error sums of 8 choices of 3 digits with three values each, the first digit at ``first_value``."""
    zero_error = (
        digit_errors[first_value] + digit_errors[first_value + 1] + digit_errors[first_value + 2]
    )
    sums = load(patterns, 192 + chunk) + broadcast(zero_error)
    for i in range(3):
        digit_zero = digit_errors[first_value + i]
        sums += load(patterns, 64 * i + chunk) * broadcast(
            digit_errors[8 + first_value + i] - digit_zero
        )
        sums += load(patterns, 64 * i + 32 + chunk) * broadcast(
            digit_errors[16 + first_value + i] - digit_zero
        )
    return sums


@inlined_jit
def _best_second_half(second_sums, half_penalties, first_half, count):  # type: ignore[no-untyped-def]
    """Return the smallest error of a second half that forms a point with the given first half."""
    min_error = broadcast(MAX_FLOAT32)
    for chunk in range(0, count, 8):
        min_error = vector_min(
            load(second_sums, chunk) + load(half_penalties, first_half * count + chunk), min_error
        )
    return lane_min(min_error)


@inlined_jit
def _try_first_halves(  # type: ignore[no-untyped-def]
    first_errors,
    lane,
    second_error,
    start_half,
    best_half,
    best_error,
    first_sums,
    second_sums,
    half_penalties,
    count,
):
    """Try 8 first halves from index ``lane``; return the best first half so far, its error, and the point's error."""
    first_half, first_error = best_half
    bits = less_mask(first_errors, broadcast(best_error - second_error))
    if bits:
        store(first_sums, 0, first_errors)
    while bits:
        lane_index = first_bit(bits)
        bits &= bits - 1
        candidate = lane + lane_index
        candidate_error = first_sums[lane_index]
        if candidate != start_half:
            total_error = candidate_error + _best_second_half(
                second_sums, half_penalties, candidate, count
            )
            if total_error < best_error:
                first_half, first_error, best_error = candidate, candidate_error, total_error
    return (first_half, first_error), best_error


# A full metric


@jit
def nearest_in_metric(targets, steps, shifts, points, layout, shift_size, metric, marginal, codes):  # type: ignore[no-untyped-def]
    """Fill in codes of points near vectors ``targets`` ``[n, weights per code]`` under ``metric``.

    Args:
        targets, steps, shifts: float32, those of each vector.
        points: float32 ``[points, width]``.
        layout: values of a point, points of a code, bits of an index; whether there are signs, whether their number of
            negatives is even, and whether a code chooses between two shifts.
        shift_size: the size of these shifts.
        metric: float32, square.
        marginal: the metric of the first point if the second is chosen freely; unused if a code has one point.
        codes: output, int32 ``[n]``.
    """
    width, points_per_code, index_bits, signed, _, has_two_shifts = layout
    columns, num_points = width * points_per_code, len(points)
    table = numpy.ascontiguousarray(points.T)
    num_masks = 1 << width if signed else 1
    metric_terms = numpy.empty((num_masks, num_points), numpy.float32)
    marginal_terms, second_terms = metric_terms, metric_terms
    if points_per_code > 1:
        marginal_terms = numpy.empty_like(metric_terms)
        second_terms = numpy.empty_like(metric_terms)
    cache = (metric_terms, marginal_terms, second_terms, numpy.zeros(num_masks, numpy.bool_))
    scaled_target, linear_terms, signed_linear = numpy.empty((3, columns), numpy.float32)
    score = numpy.empty(num_points, numpy.float32)
    masks, order = numpy.zeros(5, numpy.int64), numpy.empty(columns, numpy.int64)
    scratch = (linear_terms, signed_linear, masks, order, score)
    for vector in range(len(targets)):
        step, code, best_distance = steps[vector], 0, MAX_FLOAT32
        inverse = _ZERO if step == _ZERO else _ONE / step
        for shift_index in range(2 if has_two_shifts else 1):
            shift = (
                shifts[vector]
                if not has_two_shifts
                else shift_size
                if shift_index == 0
                else -shift_size
            )
            for i in range(columns):
                scaled_target[i] = targets[vector, i] * inverse - shift
            distance, point_bits, sign_mask = _best_vector(
                scaled_target, metric, marginal, table, layout, cache, scratch
            )
            if distance < best_distance:
                best_distance = distance
                code = point_bits | (sign_mask | shift_index) << (index_bits * points_per_code)
        codes[vector] = code


@internal_jit
def _best_vector(target, metric, marginal, table, layout, cache, scratch):  # type: ignore[no-untyped-def]
    """Return distance, point indices and signs of the best of a few choices of signs for one vector."""
    width, points_per_code, index_bits, signed, even_signs, _ = layout
    metric_terms, marginal_terms, second_terms, is_computed = cache
    linear_terms, signed_linear, masks, order, score = scratch
    num_columns, constant = width * points_per_code, _ZERO
    for i in range(num_columns):
        linear_terms[i] = _ZERO
        for j in range(num_columns):
            linear_terms[i] -= _TWO * metric[i, j] * target[j]
        constant -= linear_terms[i] * target[i] / _TWO
    best_distance, best_points, best_mask = MAX_FLOAT32, 0, 0
    masks[0], num_choices, half_mask = 0, 1, (1 << width) - 1
    if signed:
        num_choices = _sign_choices(target, metric, num_columns, even_signs, masks, order)
    for choice in range(num_choices):
        mask = masks[choice]
        for i in range(num_columns):
            signed_linear[i] = -linear_terms[i] if mask >> i & 1 else linear_terms[i]
        first_mask, second_mask = (
            (mask, mask) if points_per_code == 1 else (mask & half_mask, mask >> width)
        )
        for mask_part in (first_mask, second_mask):
            if not is_computed[mask_part]:
                is_computed[mask_part] = True
                _quadratic_terms(table, metric, 0, mask_part, metric_terms[mask_part])
                if points_per_code > 1:
                    _quadratic_terms(table, marginal, 0, mask_part, marginal_terms[mask_part])
                    _quadratic_terms(table, metric, width, mask_part, second_terms[mask_part])
        if points_per_code == 1:
            point_bits, score_sum = _nearest_point(table, metric_terms[mask], signed_linear)
        else:
            term_tables = (
                metric_terms[first_mask],
                marginal_terms[first_mask],
                second_terms[second_mask],
            )
            score_sum, point_bits = _best_pair(
                table, term_tables, metric, marginal, target, signed_linear, mask, score, index_bits
            )
        if score_sum + constant < best_distance:
            best_distance, best_points, best_mask = score_sum + constant, point_bits, mask
    return best_distance, best_points, best_mask


@inlined_jit
def _sign_choices(target, metric, num_columns, even_signs, masks, order):  # type: ignore[no-untyped-def]
    """Fill ``masks`` with sign choices and return their number: the signs of ``target``, some flipped."""
    sign_mask, num_negative = 0, 0
    for i in range(num_columns):
        if target[i] < _ZERO:
            sign_mask, num_negative = sign_mask | 1 << i, num_negative + 1
        cost, position = abs(target[i]) * metric[i, i], i
        while (
            position > 0
            and abs(target[order[position - 1]]) * metric[order[position - 1], order[position - 1]]
            > cost
        ):
            order[position] = order[position - 1]
            position -= 1
        order[position] = i
    flip0, flip1, flip2, flip3 = 1 << order[0], 1 << order[1], 1 << order[2], 1 << order[3]
    if even_signs and num_negative % 2:
        masks[0], masks[1], masks[2], masks[3] = (
            sign_mask ^ flip0,
            sign_mask ^ flip1,
            sign_mask ^ flip2,
            sign_mask ^ flip3,
        )
        return 4
    if even_signs:
        masks[0], masks[1], masks[2], masks[3] = (
            sign_mask,
            sign_mask ^ flip0 ^ flip1,
            sign_mask ^ flip0 ^ flip2,
            sign_mask ^ flip1 ^ flip2,
        )
        return 4
    masks[0], masks[1], masks[2], masks[3] = (
        sign_mask,
        sign_mask ^ flip0,
        sign_mask ^ flip1,
        sign_mask ^ flip2,
    )
    masks[4] = sign_mask ^ flip0 ^ flip1
    return 5


@internal_jit
def _best_pair(  # type: ignore[no-untyped-def]
    table, term_tables, metric, marginal, target, signed_linear, sign_mask, score, index_bits
):
    """Return score and indices of two points.

    The first points that are tried are the nearest by the distance that no second point can reduce further.
    """
    width, (metric_terms, marginal_terms, second_terms) = table.shape[0], term_tables
    first_slopes = numpy.empty(width, numpy.float32)
    second_slopes = numpy.empty(width, numpy.float32)
    for i in range(width):
        linear_sum = _ZERO
        for j in range(width):
            linear_sum -= _TWO * marginal[i, j] * target[j]
        first_slopes[i] = -linear_sum if sign_mask >> i & 1 else linear_sum
    candidates = numpy.empty(NUM_FIRST_POINTS, numpy.int64)
    for first_point in range(0, table.shape[1], 8):
        store(score, first_point, _scores(table, marginal_terms, first_slopes, first_point))
    for rank in range(NUM_FIRST_POINTS):
        candidates[rank] = _argmin_score(score)
        score[candidates[rank]] = MAX_FLOAT32
    best_score, best_points = MAX_FLOAT32, 0
    for rank in range(NUM_FIRST_POINTS):
        first_point = candidates[rank]
        first_score = metric_terms[first_point]
        for i in range(width):
            first_score += signed_linear[i] * table[i, first_point]
            second_slopes[i] = signed_linear[width + i]
        for i in range(width):
            for j in range(width):
                cross_term = _TWO * metric[width + i, j] * table[j, first_point]
                second_slopes[i] += (
                    -cross_term if (sign_mask >> (width + i) ^ sign_mask >> j) & 1 else cross_term
                )
        second_point, second_score = _nearest_point(table, second_terms, second_slopes)
        if first_score + second_score < best_score:
            best_score = first_score + second_score
            best_points = first_point | second_point << index_bits
    return best_score, best_points


@inlined_jit
def _quadratic_terms(table, metric, first_coordinate, sign_mask, out):  # type: ignore[no-untyped-def]
    """Compute ``g (S M S) g`` of all points; ``M`` is the metric from ``first_coordinate``, ``S`` from the signs."""
    width, points = table.shape
    for p in range(points):
        out[p] = _ZERO
    for i in range(width):
        for j in range(i + 1):
            value = metric[first_coordinate + i, first_coordinate + j] * (_ONE if i == j else _TWO)
            value = -value if (sign_mask >> i ^ sign_mask >> j) & 1 else value
            for p in range(points):
                out[p] += value * (table[i, p] * table[j, p])


@inlined_jit
def _nearest_point(table, terms, slopes):  # type: ignore[no-untyped-def]
    """Return the point with the smallest score, the first of equal ones, and that score."""
    best_score, indices = broadcast(MAX_FLOAT32), load(LANE_INDICES, 0)
    best_index = indices
    for p in range(0, table.shape[1], 8):
        score = _scores(table, terms, slopes, p)
        best_index = select_if_less(score, best_score, indices, best_index)
        best_score = vector_min(score, best_score)
        indices += broadcast(_EIGHT)
    return argmin_lane(best_score, best_index)


@inlined_jit
def _argmin_score(score):  # type: ignore[no-untyped-def]
    """Return the index of the smallest score, the first of equal ones."""
    best_score, indices = broadcast(MAX_FLOAT32), load(LANE_INDICES, 0)
    best_index = indices
    for p in range(0, len(score), 8):
        chunk = load(score, p)
        best_index = select_if_less(chunk, best_score, indices, best_index)
        best_score = vector_min(chunk, best_score)
        indices += broadcast(_EIGHT)
    return argmin_lane(best_score, best_index)[0]


@inlined_jit
def _scores(table, terms, slopes, p):  # type: ignore[no-untyped-def]
    """Return ``terms + table slopes`` of 8 points, ``table`` is ``[width, points]``."""
    if table.shape[0] == 8:
        return load(terms, p) + (
            _sum_four_coordinates(table, 0, slopes, p) + _sum_four_coordinates(table, 4, slopes, p)
        )
    return load(terms, p) + _sum_four_coordinates(table, 0, slopes, p)


@inlined_jit
def _sum_four_coordinates(table, first_coordinate, slopes, p):  # type: ignore[no-untyped-def]
    """Return what 4 coordinates from ``first_coordinate`` contribute to the scores of 8 points."""
    start, size = first_coordinate * table.shape[1] + p, table.shape[1]
    total = broadcast(slopes[first_coordinate]) * load(table, start)
    for i in range(1, 4):
        total += broadcast(slopes[first_coordinate + i]) * load(table, start + i * size)
    return total
