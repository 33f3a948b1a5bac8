"""Loops of `nf4`, `fp8` and `integer` that encode whole matrices on a CPU, compiled by numba.

They give the same bits as the torch code (a test compares them) and are used for matrices of at least `COMPILED_FROM`
weights, or strips of such matrices. For smaller ones the second that compilation takes per process would cost more than
it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor

from quantforge.numerics import COMPILED_FROM

# Size of the whole matrix while strips of it are rounded; 0: none.
_MATRIX_WEIGHTS: ContextVar[int] = ContextVar("matrix_weights", default=0)
CHUNK_WEIGHTS = 1 << 16  # weights whose temporaries stay in the second-level cache
TILE_WEIGHTS = 1024  # weights that stay in the first-level cache between two loops


def supports(weight: Tensor, columns: slice | None = None) -> bool:
    """Return whether these loops can encode a matrix: whole, float32, contiguous, on a CPU, and large enough."""
    eligible = (
        weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    )
    is_large = max(weight.numel(), _MATRIX_WEIGHTS.get()) >= COMPILED_FROM
    return columns is None and eligible and is_large


@contextmanager
def strip_of(matrix_weights: int) -> Iterator[None]:
    """Treat matrices rounded in a ``with`` block, on this thread, as strips of a matrix of that many weights."""
    token = _MATRIX_WEIGHTS.set(matrix_weights)
    try:
        yield
    finally:
        _MATRIX_WEIGHTS.reset(token)


def row_chunks(weight: Tensor) -> list[slice]:
    """Return slices of rows that are small enough for their temporaries to stay in a core's cache."""
    rows_per_chunk = max(1, CHUNK_WEIGHTS // max(1, weight.shape[1]))
    return [
        slice(first, min(first + rows_per_chunk, len(weight)))
        for first in range(0, len(weight), rows_per_chunk)
    ]


def group_absmax(weight: Tensor, num_groups: int) -> Tensor:
    """Return the largest magnitude of each group, ``[out, num_groups]``; weights must not be NaN."""
    if supports(weight, None):
        bits = torch.empty(len(weight), num_groups, dtype=torch.int32)
        _compiled_loops()["peaks"](weight.view(torch.int32).numpy(), bits.numpy())
        return bits.view(torch.float32)
    absmax = torch.empty(len(weight), num_groups, dtype=weight.dtype, device=weight.device)
    for rows in row_chunks(weight):
        grouped = weight[rows].abs().reshape(rows.stop - rows.start, num_groups, -1)
        torch.amax(grouped, -1, out=absmax[rows])
    return absmax


def encode_by_thresholds(
    weight: Tensor, inverse_scales: Tensor, thresholds: tuple[float, ...]
) -> Tensor:
    """Return how many of 15 ``thresholds`` each ``weight * inverse_scale`` exceeds, uint8.

    ``inverse_scales`` are ``[out, groups]``.
    """
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    threshold_array = torch.tensor(thresholds, dtype=torch.float32).numpy()
    _compiled_loops()["ranks"](
        weight.numpy(), inverse_scales.contiguous().numpy(), threshold_array, codes.numpy()
    )
    return codes


def encode_e4m3(weight: Tensor, scales: Tensor) -> Tensor:
    """Return ``weight / scales`` clamped to 448 and rounded to e4m3; ``scales`` are ``[out, groups]``."""
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    _compiled_loops()["e4m3"](weight.numpy(), scales.contiguous().numpy(), codes.numpy())
    return codes.view(torch.float8_e4m3fn)


def encode_integers(weight: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    """Return ``weight / scales`` rounded to integers in ``[low, high]``, int8; ``scales`` are ``[out, groups]``."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    _compiled_loops()["integers"](
        weight.numpy(), scales.contiguous().numpy(), float(low), float(high), codes.numpy()
    )
    return codes


@cache
def _compiled_loops() -> dict[str, Callable[..., Any]]:
    import numba

    jit = numba.njit(nogil=True, error_model="numpy")
    return {name: jit(loop) for name, loop in _LOOPS.items()}


def _absmax_loop(bits: Any, absmax: Any) -> None:
    # Positive floats are ordered as their bits are, and a maximum of integers is vectorised.
    size = bits.shape[1] // absmax.shape[1]
    for row in range(bits.shape[0]):
        for group in range(absmax.shape[1]):
            values, largest = bits[row, group * size : (group + 1) * size], numpy.int32(0)
            for j in range(size):
                largest = max(largest, values[j] & numpy.int32(0x7FFFFFFF))
            absmax[row, group] = largest


def _threshold_loop(weight: Any, inverse_scales: Any, thresholds: Any, codes: Any) -> None:
    t0, t1, t2, t3, t4 = thresholds[0], thresholds[1], thresholds[2], thresholds[3], thresholds[4]
    t5, t6, t7, t8, t9 = thresholds[5], thresholds[6], thresholds[7], thresholds[8], thresholds[9]
    t10 = thresholds[10]
    t11 = thresholds[11]
    t12 = thresholds[12]
    t13 = thresholds[13]
    t14 = thresholds[14]
    size = weight.shape[1] // inverse_scales.shape[1]
    for row in range(weight.shape[0]):
        for group in range(inverse_scales.shape[1]):
            scale, start = inverse_scales[row, group], group * size
            values, row_codes = weight[row, start : start + size], codes[row, start : start + size]
            for j in range(size):
                v = values[j] * scale
                count = (
                    numpy.int32(v > t0)
                    + numpy.int32(v > t1)
                    + numpy.int32(v > t2)
                    + numpy.int32(v > t3)
                )
                count += (
                    numpy.int32(v > t4)
                    + numpy.int32(v > t5)
                    + numpy.int32(v > t6)
                    + numpy.int32(v > t7)
                )
                count += (
                    numpy.int32(v > t8)
                    + numpy.int32(v > t9)
                    + numpy.int32(v > t10)
                    + numpy.int32(v > t11)
                )
                count += numpy.int32(v > t12) + numpy.int32(v > t13) + numpy.int32(v > t14)
                row_codes[j] = numpy.uint8(count)


def _e4m3_loop(weight: Any, scales: Any, codes: Any) -> None:
    size = weight.shape[1] // scales.shape[1]
    tiles_per_group = (size + TILE_WEIGHTS - 1) // TILE_WEIGHTS
    quotients = numpy.empty(TILE_WEIGHTS, numpy.float32)
    shifted = numpy.empty(TILE_WEIGHTS, numpy.float32)
    quotient_bits, shifted_bits = quotients.view(numpy.int32), shifted.view(numpy.int32)
    max_e4m3 = numpy.float32(448)
    for row in range(weight.shape[0]):
        for tile in range(scales.shape[1] * tiles_per_group):
            group = tile // tiles_per_group
            start = group * size + (tile - group * tiles_per_group) * TILE_WEIGHTS
            stop = min(start + TILE_WEIGHTS, (group + 1) * size)
            scale = scales[row, group]
            values, row_codes = weight[row, start:stop], codes[row, start:stop]
            for j in range(stop - start):
                v = values[j] / scale
                v = -max_e4m3 if v < -max_e4m3 else v
                v = max_e4m3 if v > max_e4m3 else v
                quotients[j] = v
                # Its last bit counts 2^-9, the subnormal step
                shifted[j] = abs(v) + numpy.float32(16384)
            for j in range(stop - start):
                magnitude_bits = quotient_bits[j] & 0x7FFFFFFF
                # Round the mantissa to 3 bits, ties to even; the bias goes from 127 to 7.
                normal = ((magnitude_bits + 0x7FFFF + ((magnitude_bits >> 20) & 1)) >> 20) - 960
                # Below 2^-6
                code = shifted_bits[j] - 0x46800000 if magnitude_bits < 0x3C800000 else normal
                row_codes[j] = numpy.uint8(((quotient_bits[j] >> 24) & 0x80) | code)


def _integer_loop(weight: Any, scales: Any, low: Any, high: Any, codes: Any) -> None:
    size = weight.shape[1] // scales.shape[1]
    low_limit, high_limit = numpy.float32(low), numpy.float32(high)
    for row in range(weight.shape[0]):
        for group in range(scales.shape[1]):
            scale, start = scales[row, group], group * size
            values, row_codes = weight[row, start : start + size], codes[row, start : start + size]
            for j in range(size):
                v = numpy.rint(values[j] / scale)
                row_codes[j] = numpy.int8(numpy.minimum(numpy.maximum(v, low_limit), high_limit))


_LOOPS = {
    "peaks": _absmax_loop,
    "ranks": _threshold_loop,
    "e4m3": _e4m3_loop,
    "integers": _integer_loop,
}
