"""Codes of whole matrices on a CPU, in one pass: the loops of `nf4`, `fp8` and `integer`, compiled by numba.

They give what the plain torch code gives, to the bit (a test compares), and are used from `COMPILED_FROM` weights on,
or in the strips of so many: below, the second that compiling takes in every process would be longer than the work.
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

_MATRIX: ContextVar[int] = ContextVar("weights of the matrix that a strip is of", default=0)
CHUNK = 1 << 16  # weights of which temporaries stay in the second cache
TILE = 1024  # weights that stay in the first cache between two loops


def suits(weight: Tensor, columns: slice | None = None) -> bool:
    """Return whether a matrix is for these loops: whole, float32, contiguous, on a CPU, and large enough."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    large = max(weight.numel(), _MATRIX.get()) >= COMPILED_FROM
    return columns is None and plain and large


@contextmanager
def strip_of(weights: int) -> Iterator[None]:
    """Take what is rounded in a ``with`` block, on this thread, for strips of a matrix of so many weights."""
    token = _MATRIX.set(weights)
    try:
        yield
    finally:
        _MATRIX.reset(token)


def chunks(weight: Tensor) -> list[slice]:
    """Return runs of rows whose temporaries stay in a core's cache."""
    step = max(1, CHUNK // max(1, weight.shape[1]))
    return [slice(first, min(first + step, len(weight))) for first in range(0, len(weight), step)]


def peaks(weight: Tensor, groups: int) -> Tensor:
    """Return the largest magnitude of each of ``groups`` runs of every row, ``[out, groups]``; of no NaN."""
    if suits(weight, None):
        bits = torch.empty(len(weight), groups, dtype=torch.int32)
        _compiled()["peaks"](weight.view(torch.int32).numpy(), bits.numpy())
        return bits.view(torch.float32)
    found = torch.empty(len(weight), groups, dtype=weight.dtype, device=weight.device)
    for chunk in chunks(weight):
        parts = weight[chunk].abs().reshape(chunk.stop - chunk.start, groups, -1)
        torch.amax(parts, -1, out=found[chunk])
    return found


def ranks(weight: Tensor, inverse: Tensor, thresholds: tuple[float, ...]) -> Tensor:
    """Return how many of 15 ``thresholds`` each ``weight * inverse`` exceeds, uint8; ``inverse`` ``[out, groups]``."""
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    limits = torch.tensor(thresholds, dtype=torch.float32).numpy()
    _compiled()["ranks"](weight.numpy(), inverse.contiguous().numpy(), limits, codes.numpy())
    return codes


def e4m3(weight: Tensor, scales: Tensor) -> Tensor:
    """Return ``weight / scales`` clamped to 448 and rounded to e4m3; ``scales`` ``[out, groups]``."""
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    _compiled()["e4m3"](weight.numpy(), scales.contiguous().numpy(), codes.numpy())
    return codes.view(torch.float8_e4m3fn)


def integers(weight: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    """Return ``weight / scales`` rounded to integers in ``[low, high]``, int8; ``scales`` ``[out, groups]``."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    _compiled()["integers"](
        weight.numpy(), scales.contiguous().numpy(), float(low), float(high), codes.numpy()
    )
    return codes


@cache
def _compiled() -> dict[str, Callable[..., Any]]:
    import numba

    jit = numba.njit(nogil=True, error_model="numpy")
    return {name: jit(loop) for name, loop in _LOOPS.items()}


def _peaks(bits: Any, found: Any) -> None:
    # Positive floats are ordered as their bits are, and a maximum of integers is vectorised.
    size = bits.shape[1] // found.shape[1]
    for row in range(bits.shape[0]):
        for group in range(found.shape[1]):
            values, largest = bits[row, group * size : (group + 1) * size], numpy.int32(0)
            for j in range(size):
                largest = max(largest, values[j] & numpy.int32(0x7FFFFFFF))
            found[row, group] = largest


def _ranks(weight: Any, inverse: Any, limits: Any, codes: Any) -> None:
    t0, t1, t2, t3, t4 = limits[0], limits[1], limits[2], limits[3], limits[4]
    t5, t6, t7, t8, t9 = limits[5], limits[6], limits[7], limits[8], limits[9]
    t10, t11, t12, t13, t14 = limits[10], limits[11], limits[12], limits[13], limits[14]
    size = weight.shape[1] // inverse.shape[1]
    for row in range(weight.shape[0]):
        for group in range(inverse.shape[1]):
            unit, start = inverse[row, group], group * size
            values, found = weight[row, start : start + size], codes[row, start : start + size]
            for j in range(size):
                v = values[j] * unit
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
                found[j] = numpy.uint8(count)


def _e4m3(weight: Any, scales: Any, codes: Any) -> None:
    size = weight.shape[1] // scales.shape[1]
    parts = (size + TILE - 1) // TILE
    near, small = numpy.empty(TILE, numpy.float32), numpy.empty(TILE, numpy.float32)
    bits, below = near.view(numpy.int32), small.view(numpy.int32)
    largest = numpy.float32(448)
    for row in range(weight.shape[0]):
        for part in range(scales.shape[1] * parts):
            group = part // parts
            start = group * size + (part - group * parts) * TILE
            stop = min(start + TILE, (group + 1) * size)
            scale = scales[row, group]
            values, found = weight[row, start:stop], codes[row, start:stop]
            for j in range(stop - start):
                v = values[j] / scale
                v = -largest if v < -largest else v
                v = largest if v > largest else v
                near[j] = v
                small[j] = abs(v) + numpy.float32(
                    16384
                )  # its last bit counts 2^-9, the subnormal step
            for j in range(stop - start):
                whole = bits[j] & 0x7FFFFFFF
                # Round the mantissa to 3 bits, ties to even; the bias goes from 127 to 7.
                normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - 960
                code = below[j] - 0x46800000 if whole < 0x3C800000 else normal  # below 2^-6
                found[j] = numpy.uint8(((bits[j] >> 24) & 0x80) | code)


def _integers(weight: Any, scales: Any, low: Any, high: Any, codes: Any) -> None:
    size = weight.shape[1] // scales.shape[1]
    least, most = numpy.float32(low), numpy.float32(high)
    for row in range(weight.shape[0]):
        for group in range(scales.shape[1]):
            scale, start = scales[row, group], group * size
            values, found = weight[row, start : start + size], codes[row, start : start + size]
            for j in range(size):
                v = numpy.rint(values[j] / scale)
                found[j] = numpy.int8(numpy.minimum(numpy.maximum(v, least), most))


_LOOPS = {"peaks": _peaks, "ranks": _ranks, "e4m3": _e4m3, "integers": _integers}
