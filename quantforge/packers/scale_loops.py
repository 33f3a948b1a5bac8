"""The search of `scale_search` for scales of integers, in loops that numba compiles, for large matrices on a CPU.

In torch each candidate is a dozen passes over the weights; here all candidates of a group are tried while it stays in
the first cache. Sums may be reordered, so that they are vector instructions: a near tie can fall otherwise than in
torch, but always the same way, for any chunks and threads. Compiling takes seconds: see `numerics.COMPILED_FROM`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy
import torch
from torch import Tensor

FREE = {"reassoc", "nsz", "contract"}  # of LLVM's fast-math flags: not those that ignore NaN
POLISH = 2  # rounds of encoding again and fitting again
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def search(
    groups: Tensor,
    importance: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    parts: Sequence[float],
    limits: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    """Return the best scales (in the type of ``scales``) and zeros (float32), both ``[rows, groups]``.

    Args:
        groups: float32 ``[rows, groups, size]``.
        importance: float32 ``[groups, size]``.
        scales: the plain ones, in their stored type.
        zeros: the plain ones; None means a symmetric grid, where both signs of a scale are tried.
        parts: candidates, as multiples of the plain scale.
        limits: least and greatest code, least zero.
    """
    plain, found = scales.float(), torch.empty(scales.shape)
    middle = torch.zeros_like(plain)
    if zeros is not None:
        middle = (groups.amin(-1) + groups.amax(-1)) / 2
    moved = torch.zeros_like(plain) if zeros is None else zeros.to(torch.float32, copy=True)
    arrays = (groups, importance, plain, middle, found, moved)
    tried = numpy.asarray(parts, numpy.float32)
    bounds = tuple(map(numpy.float32, limits))
    choices = KINDS[scales.dtype], int(zeros is None)
    _compiled()(*(item.numpy() for item in arrays), tried, bounds, choices)
    return found.to(scales.dtype), moved


@cache
def _compiled() -> Callable[..., None]:
    import numba

    stored = numba.njit(_stored, error_model="numpy")
    jit = numba.njit(nogil=True, error_model="numpy", fastmath=FREE)
    fit, error = jit(_fit), jit(_error)

    def best(groups, importance, plain, middle, found, moved, parts, limits, choices):  # type: ignore[no-untyped-def]
        low, high, least_zero = limits
        kind, symmetric = choices
        rows, count, size = groups.shape
        codes, bits = numpy.empty(size, numpy.float32), numpy.empty(1, numpy.float32)
        for row in range(rows):
            for group in range(count):
                values, weights = groups[row, group], importance[group]
                whole, zero = plain[row, group], moved[row, group]
                fit(values, weights, codes, whole, low - zero, high - zero)
                scale, least = whole, error(values, weights, codes, whole)
                for turn in range(len(parts) * (2 if symmetric else 3) + POLISH):
                    if turn >= len(parts) * (2 if symmetric else 3):
                        tried, shifted = scale, zero
                    elif symmetric:
                        tried, shifted = whole * parts[turn // 2], numpy.float32(0)
                        tried = -tried if turn % 2 else tried
                    else:
                        tried = whole * parts[turn // 3]
                        centre = numpy.rint(high / numpy.float32(2) - middle[row, group] / tried)
                        shifted = min(max(centre + numpy.float32(turn % 3 - 1), least_zero), high)
                    fitted = fit(values, weights, codes, tried, low - shifted, high - shifted)
                    fitted = stored(fitted, kind, bits)
                    if fitted == 0 or not numpy.isfinite(fitted):
                        continue
                    wrong = error(values, weights, codes, fitted)
                    if wrong < least:
                        scale, zero, least = fitted, shifted, wrong
                found[row, group], moved[row, group] = scale, zero

    return numba.njit(best, nogil=True, error_model="numpy")  # type: ignore[no-any-return]


def _fit(values, weights, codes, scale, least, most):  # type: ignore[no-untyped-def]
    """Fill the codes (less the zero) of a group, and return the scale that suits them best."""
    unit = numpy.float32(1) / scale
    product = square = numpy.float32(0)
    for j in range(len(values)):
        code = min(max(numpy.rint(values[j] * unit), least), most)
        codes[j] = code
        weighted = code * weights[j]
        product += weighted * values[j]
        square += weighted * code
    return product / square


def _error(values, weights, codes, scale):  # type: ignore[no-untyped-def]
    total = numpy.float32(0)
    for j in range(len(values)):
        left = values[j] - codes[j] * scale
        total += weights[j] * left * left
    return total


def _stored(value, kind, room):  # type: ignore[no-untyped-def]
    """Round to float16 or bfloat16, ties to even; ``room`` is one float32 to look at the bits of."""
    if kind == 0:
        return value
    if kind == 1 and abs(value) < numpy.float32(2.0**-14):  # subnormal: a multiple of 2^-24
        return numpy.rint(value * numpy.float32(2.0**24)) * numpy.float32(2.0**-24)
    room[0] = value
    bits = room.view(numpy.int32)
    dropped = 13 if kind == 1 else 16
    half = (1 << (dropped - 1)) - 1
    bits[0] = (bits[0] + half + ((bits[0] >> dropped) & 1)) & ~((1 << dropped) - 1)
    if kind == 1 and abs(room[0]) > numpy.float32(65504):
        return numpy.float32(numpy.inf)
    return room[0]
