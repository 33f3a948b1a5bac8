"""ggml's searches for the scale of one group, restated (ggml-quants.c; names there in brackets).

They are here to be compared with: their codes are equal to ggml's to the last bit. That takes float32 throughout,
sums in the order of the elements, and products grouped as written. A column is a group: tensors are ``[size, groups]``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from quantforge.packers.ggml.grid import IQ4_VALUES, Grid, nearest, values_of

EPSILON = 1e-15


@dataclass(frozen=True, slots=True)
class Steps:
    """The candidates of `affine`: ranges from ``first`` on, ``count`` + 1 of them."""

    first: float
    width: float
    count: int
    absolute: bool = False  # weighted absolute errors instead of squares


def total(terms: Iterable[Tensor]) -> Tensor:
    """Sum in order."""
    first, *others = terms
    result = first.clone()
    for term in others:
        result += term
    return result


def over(numerator: float, denominator: Tensor) -> Tensor:
    """A true division: torch would multiply by the reciprocal."""
    return torch.full_like(denominator, numerator) / denominator


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, 0 where the denominator is not positive."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


def root(values: Tensor) -> Tensor:
    """The correctly rounded square root, which torch does not promise in float32."""
    return values.double().sqrt().float()


def signed_extreme(values: Tensor) -> Tensor:
    """The element with the largest magnitude, the first of several."""
    return values.gather(0, values.abs().argmax(0, keepdim=True))[0]


def least_of(values: Tensor) -> Tensor:
    """The least element, the first of several: zeros of both signs are such."""
    return values.gather(0, values.argmin(0, keepdim=True))[0]


def single(value: float) -> float:
    """Round to float32."""
    return float(numpy.float32(value))


def widened(codes: int, tenths: int) -> float:
    """``codes + 0.1 tenths`` in float32."""
    return float(numpy.float32(codes) + numpy.float32(0.1) * numpy.float32(tenths))


def symmetric(x: Tensor, high: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and codes ``-high..high - 1`` [make_qx_quants]; codes of an empty group are ``-high``."""
    extreme = signed_extreme(x)

    def fit(numerator: float) -> tuple[Tensor, Tensor, Tensor]:
        codes = (over(-numerator, extreme) * x).round_().clamp_(-high, high - 1)
        return codes, total(weights * x * codes), total(weights * codes * codes)

    codes, products, squares = fit(high)
    scale = torch.where(squares != 0, products / squares, 0.0)
    best = scale * products
    for tenths in (*range(-9, 0), *range(1, 10)):
        tried, products, squares = fit(widened(high, tenths))
        better = (squares > 0) & (products * products > best * squares)
        scale = torch.where(better, products / squares, scale)
        best = torch.where(better, scale * products, best)
        codes = torch.where(better, tried, codes)
    empty = extreme.abs() < EPSILON
    return torch.where(empty, 0.0, scale), torch.where(empty, -high, codes)


def descended(x: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Scale and codes by coordinate descent, squares as weights [make_q3_quants]."""
    extreme, weights = signed_extreme(x), x * x
    codes = (over(-high, extreme) * x).round_().clamp_(-high, high - 1)
    products, squares = total(weights * x * codes), total(weights * codes * codes)
    scale = descend(x, codes, weights, products, squares, (-high, high - 1))
    empty = extreme.abs() < EPSILON
    return torch.where(empty, 0.0, scale), torch.where(empty, -high, codes)


def descend(
    x: Tensor,
    codes: Tensor,
    weights: Tensor,
    products: Tensor,
    squares: Tensor,
    codes_range: tuple[int, int],
) -> Tensor:
    """Change one code at a time while the fit gets better, in place; return the scale."""
    for _ in range(5):
        before = codes.clone()
        for index in range(len(x)):
            value, weight, code = x[index], weights[index], codes[index]
            product, square = (
                products - weight * value * code,
                squares - weight * code * code,
            )
            new = (value * square / product).round().clamp(*codes_range)
            possible = (product > 0) & (square > 0 if codes_range[0] == 0 else True) & (new != code)
            product, square = product + weight * value * new, square + weight * new * new
            better = possible & (square > 0)
            better &= product * product * squares > products * products * square
            codes[index] = torch.where(better, new, code)
            products = torch.where(better, product, products)
            squares = torch.where(better, square, squares)
        if torch.equal(before, codes):
            break
    return ratio(products, squares)


def affine(x: Tensor, high: int, weights: Tensor, steps: Steps) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, lowered minimum (>= 0) and codes ``0..high`` [make_qkx2_quants, make_qkx3_quants]."""
    least, most = least_of(x), x.amax(0)
    least = torch.where(least > 0, 0.0, least)
    weight, mean = total(weights), total(weights * x)
    flat = most <= least
    floor = least

    def error(scale: Tensor, codes: Tensor, least: Tensor) -> Tensor:
        difference = scale * codes + least - x
        if steps.absolute:
            return total(weights * difference.abs())
        return total(weights * (difference * difference))

    inverse = over(high, most - least)
    scale = over(1, inverse)
    codes = (inverse * (x - least)).round_().clamp_(0, high)
    best = error(scale, codes, least)
    for index in range(steps.count + 1):
        wide = numpy.float32(steps.first) + numpy.float32(steps.width) * numpy.float32(index)
        inverse = over(float(wide + numpy.float32(high)), most - least)
        tried = (inverse * (x - least)).round_().clamp_(0, high)
        ones, squares = total(weights * tried), total(weights * tried * tried)
        products = total(weights * tried * x)
        determinant = weight * squares - ones * ones
        fitted = (weight * products - mean * ones) / determinant
        lowest = (squares * mean - ones * products) / determinant
        above = lowest > 0
        fitted = torch.where(above, products / squares, fitted)
        lowest = lowest.clamp(max=0)
        found = error(fitted, tried, lowest)
        better = (determinant > 0) & (found < best)
        best, codes = torch.where(better, found, best), torch.where(better, tried, codes)
        scale, least = torch.where(better, fitted, scale), torch.where(better, lowest, least)
    scale, codes = torch.where(flat, 0.0, scale), torch.where(flat, 0.0, codes)
    return scale, -torch.where(flat, floor, least), codes


def positive(x: Tensor, high: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and codes ``0..high`` of values that are not negative [make_qp_quants]."""
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
    products, squares = total(weights * x * codes), total(weights * codes * codes)
    scale = descend(x, codes, weights, products, squares, (0, high))
    empty = most < EPSILON
    return torch.where(empty, 0.0, scale), torch.where(empty, 0.0, codes)


def from_table(x: Tensor, weights: Tensor) -> Tensor:
    """Scale of the IQ4 table [quantize_row_iq4_nl_impl]."""
    extreme, grid = signed_extreme(x), Grid(0, 15, IQ4_VALUES)
    first = float(IQ4_VALUES[0])

    def fit(inverse: Tensor) -> tuple[Tensor, Tensor]:
        values = values_of(nearest(inverse * x, grid), grid)
        return total(weights * values * x), total(weights * values * values)

    products, squares = fit(over(1, -extreme / first))
    scale = products / squares
    best = scale * products
    for shift in range(-7, 8):
        products, squares = fit(over(shift + first, extreme))
        better = (squares > 0) & (products * products > best * squares)
        scale = torch.where(better, products / squares, scale)
        best = torch.where(better, scale * products, best)
    return torch.where(extreme.abs() < EPSILON, 0.0, scale)
