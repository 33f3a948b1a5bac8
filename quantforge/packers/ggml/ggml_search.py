"""ggml's searches for the scale of one group, restated (ggml-quants.c; names there in brackets).

``--scales reference`` rounds by them: their codes are equal to ggml's to the last bit. That takes float32 throughout,
sums in the order of the elements, and products grouped as written. A column is a group: tensors are ``[size, groups]``,
and what takes the time is in `ggml_loops`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from quantforge.grids import IQ4_VALUES
from quantforge.packers.ggml import lanes
from quantforge.packers.ggml.grid import CodeRange

EPSILON = 1e-15


@dataclass(frozen=True, slots=True)
class Steps:
    """Candidates of `affine`: inverse scales ``(high + first + i * width) / range``, ``i`` from 0 to ``count``."""

    first: float
    width: float
    count: int
    absolute: bool = False  # weighted absolute errors instead of squares


def total(terms: Iterable[Tensor]) -> Tensor:
    """Sum each column in the order of its elements."""
    first, *others = terms
    result = first.clone()
    for term in others:
        result += term
    return result


def over(numerator: float, denominator: Tensor) -> Tensor:
    """Divide truly: torch would multiply by the reciprocal."""
    return torch.full_like(denominator, numerator) / denominator


def root(values: Tensor) -> Tensor:
    """Return the correctly rounded square root, which torch does not promise in float32."""
    return torch.from_numpy(numpy.sqrt(values.numpy()))


def signed_extreme(values: Tensor) -> Tensor:
    """Return the element of largest magnitude of each column, the first of several."""
    found = torch.empty(values.shape[1])
    _loops().signed_extreme(*_arrays(values), found.numpy())
    return found


def single(value: float) -> float:
    """Round to float32."""
    return float(numpy.float32(value))


def widened(codes: int, tenths: int) -> float:
    """Return ``codes + 0.1 tenths`` in float32."""
    return float(numpy.float32(codes) + numpy.float32(0.1) * numpy.float32(tenths))


def mean_squares(rows: Tensor) -> Tensor:
    """Return the mean square of each row, summed in order."""
    found = torch.empty(len(rows))
    _loops().mean_squares(*_arrays(rows), found.numpy())
    return found


def symmetric(x: Tensor, high: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and codes ``-high..high - 1`` [make_qx_quants]; codes of an empty group are ``-high``."""
    tried = [high, *(widened(high, tenths) for tenths in (*range(-9, 0), *range(1, 10)))]
    scales, codes = torch.empty(x.shape[1]), torch.empty(x.shape)
    numbers = numpy.float32(high), numpy.array(tried, numpy.float32)
    _loops().symmetric(*_arrays(x, weights), *numbers, scales.numpy(), codes.numpy())
    return scales, codes


def descended(x: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Find scale and codes by coordinate descent, squares as weights [make_q3_quants]."""
    extreme = signed_extreme(x)
    codes = (over(-high, extreme) * x).round_().clamp_(-high, high - 1)
    scale = descend(x, codes, x * x, (-high, high - 1))
    empty = extreme.abs() < EPSILON
    return torch.where(empty, 0.0, scale), torch.where(empty, -high, codes)


def descend(x: Tensor, codes: Tensor, weights: Tensor, limits: tuple[int, int]) -> Tensor:
    """Change one code at a time while the fit gets better, five times over, in place; return the scale."""
    scales = torch.empty(x.shape[1])
    low, high = map(numpy.float32, limits)
    _loops().descend(*_arrays(x, weights), low, high, codes.numpy(), scales.numpy())
    return scales


def affine(x: Tensor, high: int, weights: Tensor, steps: Steps) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale, minus the minimum (>= 0) and codes ``0..high`` [make_qkx2_quants, make_qkx3_quants]."""
    first, width = numpy.float32(steps.first), numpy.float32(steps.width)
    widths = numpy.array(
        [
            first + width * numpy.float32(index) + numpy.float32(high)
            for index in range(steps.count + 1)
        ],
        numpy.float32,
    )
    scales, lowered, codes = (
        torch.empty(x.shape[1]),
        torch.empty(x.shape[1]),
        torch.empty(x.shape),
    )
    found = (part.numpy() for part in (scales, lowered, codes))
    _affine().affine(*_arrays(x, weights), numpy.float32(high), widths, steps.absolute, *found)
    return scales, lowered, codes


def positive(x: Tensor, high: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and codes ``0..high`` of values that are not negative [make_qp_quants]."""
    most = x.amax(0).clamp(min=0)

    def codes_of(inverse: Tensor) -> Tensor:
        return (inverse * x).round_().clamp_(max=high)

    def error(inverse: Tensor) -> Tensor:
        difference = x - over(1, inverse) * codes_of(inverse)
        return total(weights * difference * difference)

    inverse = over(high, most)
    best = error(inverse)
    for tenths in (*range(-4, 0), *range(1, 5)):
        tried = over(widened(high, tenths), most)
        found = error(tried)
        better = found < best
        best, inverse = torch.where(better, found, best), torch.where(better, tried, inverse)
    codes = codes_of(inverse)
    scale = descend(x, codes, weights, (0, high))
    empty = most < EPSILON
    return torch.where(empty, 0.0, scale), torch.where(empty, 0.0, codes)


def from_table(x: Tensor, weights: Tensor) -> Tensor:
    """Return the scale of the IQ4 table [quantize_row_iq4_nl_impl]."""
    low, _, middles, rises = lanes.thresholds(CodeRange(0, 15, IQ4_VALUES))
    ratios = numpy.array([0, *(low + shift for shift in range(-7, 8))], numpy.float32)
    scales = torch.empty(x.shape[1])
    _loops().from_table(*_arrays(x, weights), ratios, low, middles, rises, scales.numpy())
    return scales


def _loops() -> ModuleType:
    from quantforge.packers.ggml import ggml_loops

    return ggml_loops


def _affine() -> ModuleType:
    from quantforge.packers.ggml import ggml_affine

    return ggml_affine


def _arrays(*tensors: Tensor) -> list[numpy.ndarray[Any, Any]]:
    return [tensor.contiguous().numpy() for tensor in tensors]
