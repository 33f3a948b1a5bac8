"""The search of `scale_search` for integer scales, in loops compiled by numba.

In torch each candidate takes a dozen passes over the weights; here all candidates of a group are tried while it is in
the first-level cache. Sums may be reordered to use vector instructions: near ties can differ from torch, but are always
decided the same way, for any chunks and threads. Compilation takes seconds: see `numerics.COMPILED_FROM`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy
import torch
from torch import Tensor

# LLVM's fast-math flags without those that ignore NaN
FASTMATH_FLAGS = {"reassoc", "nsz", "contract"}
REFINE_ROUNDS = 2  # rounds of encoding again and fitting again
DTYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def search_integer_scales(
    groups: Tensor,
    importance: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    factors: Sequence[float],
    limits: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    """Return the best scales (in the type of ``scales``) and zeros (float32), both ``[rows, groups]``.

    Args:
        groups: weights, float32 ``[rows, groups, size]``.
        importance: float32 ``[groups, size]``.
        scales: the plain scales, in their stored type.
        zeros: the plain zeros; None means a symmetric grid, for which scales of both signs are tried.
        factors: candidates, as multiples of the plain scale.
        limits: smallest and largest code, smallest zero.
    """
    initial, best_scales = scales.float(), torch.empty(scales.shape)
    midrange = torch.zeros_like(initial)
    if zeros is not None:
        midrange = (groups.amin(-1) + groups.amax(-1)) / 2
    best_zeros = torch.zeros_like(initial) if zeros is None else zeros.to(torch.float32, copy=True)
    arrays = (groups, importance, initial, midrange, best_scales, best_zeros)
    factor_array = numpy.asarray(factors, numpy.float32)
    code_limits = tuple(map(numpy.float32, limits))
    grid_options = DTYPE_NUMBERS[scales.dtype], int(zeros is None)
    _compiled_search()(
        *(array.numpy() for array in arrays), factor_array, code_limits, grid_options
    )
    return best_scales.to(scales.dtype), best_zeros


@cache
def _compiled_search() -> Callable[..., None]:
    import numba

    round_to_stored = numba.njit(_round_to_stored, error_model="numpy")
    jit = numba.njit(nogil=True, error_model="numpy", fastmath=FASTMATH_FLAGS)
    fit_scale, weighted_error = jit(_fit_scale), jit(_weighted_error)

    def search_groups(  # type: ignore[no-untyped-def]
        groups, importance, initial, midrange, scales, zeros, factors, code_limits, grid_options
    ):
        low, high, min_zero = code_limits
        dtype_number, symmetric = grid_options
        rows, num_groups, size = groups.shape
        codes, buffer = numpy.empty(size, numpy.float32), numpy.empty(1, numpy.float32)
        for row in range(rows):
            for group in range(num_groups):
                values, weights = groups[row, group], importance[group]
                initial_scale, zero = initial[row, group], zeros[row, group]
                fit_scale(values, weights, codes, initial_scale, low - zero, high - zero)
                scale = initial_scale
                best_error = weighted_error(values, weights, codes, scale)
                for trial in range(len(factors) * (2 if symmetric else 3) + REFINE_ROUNDS):
                    if trial >= len(factors) * (2 if symmetric else 3):
                        candidate, candidate_zero = scale, zero
                    elif symmetric:
                        candidate = initial_scale * factors[trial // 2]
                        candidate = -candidate if trial % 2 else candidate
                        candidate_zero = numpy.float32(0)
                    else:
                        candidate = initial_scale * factors[trial // 3]
                        centered_zero = numpy.rint(
                            high / numpy.float32(2) - midrange[row, group] / candidate
                        )
                        candidate_zero = min(
                            max(centered_zero + numpy.float32(trial % 3 - 1), min_zero), high
                        )
                    fitted_scale = fit_scale(
                        values,
                        weights,
                        codes,
                        candidate,
                        low - candidate_zero,
                        high - candidate_zero,
                    )
                    fitted_scale = round_to_stored(fitted_scale, dtype_number, buffer)
                    if fitted_scale == 0 or not numpy.isfinite(fitted_scale):
                        continue
                    candidate_error = weighted_error(values, weights, codes, fitted_scale)
                    if candidate_error < best_error:
                        scale, zero, best_error = fitted_scale, candidate_zero, candidate_error
                scales[row, group], zeros[row, group] = scale, zero

    return numba.njit(search_groups, nogil=True, error_model="numpy")  # type: ignore[no-any-return]


def _fit_scale(values, weights, codes, scale, low, high):  # type: ignore[no-untyped-def]
    """Fill in the codes (minus the zero) of a group, and return the scale that fits them best."""
    inverse = numpy.float32(1) / scale
    weighted_product = weighted_square = numpy.float32(0)
    for j in range(len(values)):
        code = min(max(numpy.rint(values[j] * inverse), low), high)
        codes[j] = code
        weighted_code = code * weights[j]
        weighted_product += weighted_code * values[j]
        weighted_square += weighted_code * code
    return weighted_product / weighted_square


def _weighted_error(values, weights, codes, scale):  # type: ignore[no-untyped-def]
    total = numpy.float32(0)
    for j in range(len(values)):
        residual = values[j] - codes[j] * scale
        total += weights[j] * residual * residual
    return total


def _round_to_stored(value, dtype_number, buffer):  # type: ignore[no-untyped-def]
    """Round to float16 or bfloat16, ties to even; ``buffer`` is scratch space of one float32."""
    if dtype_number == 0:
        return value
    if dtype_number == 1 and abs(value) < numpy.float32(2.0**-14):  # subnormal: a multiple of 2^-24
        return numpy.rint(value * numpy.float32(2.0**24)) * numpy.float32(2.0**-24)
    buffer[0] = value
    bits = buffer.view(numpy.int32)
    dropped_bits = 13 if dtype_number == 1 else 16
    rounding = (1 << (dropped_bits - 1)) - 1
    bits[0] = (bits[0] + rounding + ((bits[0] >> dropped_bits) & 1)) & ~((1 << dropped_bits) - 1)
    if dtype_number == 1 and abs(buffer[0]) > numpy.float32(65504):
        return numpy.float32(numpy.inf)
    return buffer[0]
