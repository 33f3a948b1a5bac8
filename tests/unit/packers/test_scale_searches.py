"""Scale searches equal a slow search in float64, also at the limits of their range."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantforge.notation import parse
from quantforge.packers import fp4, fp8, nf4

Array = NDArray[numpy.float64]
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
E4M3 = [
    (2**-6 if e == 0 else 2.0 ** (e - 7)) * ((e > 0) + m / 8) for e in range(16) for m in range(8)
]
E4M3 = E4M3[:-1]  # the last is NaN


def hard(rows: int, columns: int, size: int) -> tuple[Tensor, Tensor]:
    """Weights and column weights that every candidate of a search is the best for, here or there."""
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(rows, columns, generator=generator)
    outlier = torch.rand(rows, 1, generator=generator) * 2 + 1
    importance = torch.rand(columns, generator=generator) + 0.01
    weight[:, ::size] = outlier * weight.view(rows, -1, size).abs().amax(-1)
    weight[::2, ::size] *= -1
    importance[::size] = 0.003
    return weight, importance


def both(levels: Sequence[float]) -> Array:
    return numpy.unique([sign * level for level in levels for sign in (-1, 1)]).astype(float)


def nearest(values: Array, levels: Array) -> Array:
    at = numpy.clip(numpy.searchsorted(levels, values), 1, len(levels) - 1)
    below, above = levels[at - 1], levels[at]
    return numpy.where(values - below <= above - values, below, above)


def slow(
    groups: Array,
    importance: Array,
    start: Array,
    levels: Array,
    factors: Sequence[float],
    stored: Callable[[Array], Array] = lambda scales: scales,
) -> Array:
    """Return the best scale of each group ``[n, size]``, the start and then the factors being tried in their order."""

    def tried(scales: Array, fitted: Array | None = None) -> tuple[Array, Array]:
        result = nearest(groups / scales[:, None], levels)
        if fitted is None:
            squares = (importance * result**2).sum(1)
            fitted = stored(
                (importance * groups * result).sum(1) / numpy.where(squares, squares, 1)
            )
        return fitted, (importance * (groups - result * fitted[:, None]) ** 2).sum(1)

    best, error = tried(start, start)
    for factor in [*factors, None, None]:  # the winner is fitted twice more
        fitted, lost = tried(best if factor is None else start * factor)
        better = (lost < error) & (fitted != 0)
        best, error = numpy.where(better, fitted, best), numpy.where(better, lost, error)
    return best


def parts(weight: Tensor, importance: Tensor, size: int) -> tuple[Array, Array]:
    """Groups ``[n, size]`` of a matrix and their weights."""
    groups = weight.double().reshape(-1, size).numpy()
    return groups, importance.double().expand(weight.shape).reshape(-1, size).numpy()


def agreement(result: Tensor, expected: Array) -> float:
    """The share of scales that are the same but for rounding: near ties may fall otherwise."""
    return float(
        numpy.isclose(result.double().flatten().numpy(), expected, rtol=2e-5, atol=0).mean()
    )


@pytest.mark.parametrize("grid", ["nf4", "fp4"])
def test_scales_of_codebooks_are_searched_from_above_the_range_to_two_thirds_of_it(
    grid: str,
) -> None:
    weight, importance = hard(64, 256, 32)
    groups, weights = parts(weight, importance, 32)
    start, levels = abs(groups).max(1), numpy.sort(nf4.codebook(grid).double().numpy())
    factors = numpy.linspace(1.06, 0.64, 13)
    result = nf4.fit(weight, parse(f"{grid}:g32:sym:f32"), importance, search=True)["scales"]
    expected = slow(groups, weights, start, levels, [*factors, *-factors])
    assert agreement(result, expected) > 0.985
    if grid == "nf4":
        assert 0.2 < float((result < 0).float().mean()) < 0.8
    positive = slow(groups, weights, start, levels, list(factors))
    nested = nf4.fit(weight, parse(f"{grid}:g32:sym:double"), importance, search=True)
    again = nf4.dequantize_scales(
        nf4.quantize_scales(torch.from_numpy(positive).float().view(result.shape))
    )
    assert agreement(nf4.dequantize_scales(nested), again.double().flatten().numpy()) > 0.985


def test_a_group_of_zeros_keeps_the_scale_zero_after_a_search() -> None:
    weight = torch.zeros(2, 64)
    weight[1, 32:] = 1e-3
    scales = nf4.fit(weight, parse("nf4:g32:sym:f32"), search=True)["scales"]
    assert (scales == 0).tolist() == [[True, True], [True, False]]


def odd() -> tuple[Tensor, Tensor]:
    """Three groups of nvfp4: the best candidates are the largest one, and one that would be 2.18 times the start."""
    weight = torch.zeros(1, 48)
    weight[0, :6] = torch.tensor([1, 0.32, 0.55, 0.56, 0.22, 0.72])
    weight[0, 16:22] = torch.tensor([1, 0.79, 0.64, 0.22, 0.6, 0.22])
    weight[0, 32] = 4
    return weight, torch.ones(48)


@pytest.mark.parametrize("case", [hard(64, 256, 16), odd()], ids=["hard", "odd"])
def test_scales_of_nvfp4_are_searched_from_half_to_twice_the_covering_one(
    case: tuple[Tensor, Tensor],
) -> None:
    weight, importance = case
    groups, weights = parts(weight, importance, 16)
    result = fp4.fit(weight, parse("nvfp4"), importance, search=True)
    divisor = float(result["divisor"])

    def stored(scales: Array) -> Array:
        kept = torch.from_numpy(numpy.clip(scales * divisor, 2.0**-9, 448)).to(torch.float8_e4m3fn)
        return kept.double().numpy() / divisor

    factors = [2 ** (step / 8) for step in range(-7, 9)]
    start = stored(abs(groups).max(1) / 6)
    expected = slow(groups, weights, start, both(E2M1), factors, stored)
    assert agreement(result["scales"].float() / divisor, expected) > 0.985


def test_nvfp4_search_reaches_beyond_the_largest_covering_scale() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :16] = torch.tensor([4, 3, 2, 1.5, 1, 0.5, -4, -3, -2, -1.5, -1, -0.5, 4, 3, 2, 1])
    scheme = parse("nvfp4")
    result = fp4.fit(weight, scheme, search=True)
    assert float(result["scales"][0, 0]) == 448  # and 448 / 1.5 is what covers the range
    assert torch.equal(fp4.decode(fp4.encode(weight, result, scheme), result, scheme), weight)
    plain = fp4.fit(weight, scheme)
    assert float(plain["divisor"]) == 448 * 6 / 4
    assert float(plain["scales"][0, 0]) == 448


def test_no_scale_of_nvfp4_is_below_the_least_subnormal_one() -> None:
    scales = torch.tensor([0, 1e-30, 2.0**-10, 2.0**-9, 1.4 * 2**-9, 448, 1e9])
    expected = [2.0**-9, 2.0**-9, 2.0**-9, 2.0**-9, 2.0**-9, 448, 448]
    assert fp4.round_scales_to_e4m3(scales).tolist() == expected


def test_mxfp8_search_tries_neighbouring_exponents() -> None:
    weight, importance = hard(64, 256, 32)
    first = torch.arange(256) % 32 == 0
    weight[:, 128:] *= torch.where(first, 1, 2.0**-14)[
        128:
    ]  # subnormal, and the first does not count
    importance[128:][first[128:]] = 1e-9
    weight /= 100  # a group of small weights is not one of zeros
    groups, weights = parts(weight, importance, 32)

    def stored(scales: Array) -> Array:
        return 2 ** numpy.round(numpy.log2(numpy.where(scales, scales, 2.0**-127)))

    scheme = parse("mxfp8")
    exponents = fp4.fit(weight, scheme)["exponents"]
    start = 2 ** (numpy.floor(numpy.log2(abs(groups).max(1))) - 8)
    assert numpy.array_equal(2.0 ** (exponents.flatten().double().numpy() - 127), start)
    result = fp4.fit(weight, scheme, importance, search=True)["exponents"]
    expected = slow(groups, weights, start, both(E4M3), [0.5, 2], stored)
    moves = result.int().flatten().sub(exponents.int().flatten())
    assert {-1, 0, 1} <= set(moves.tolist())
    assert agreement(torch.pow(2.0, result.double() - 127), expected) > 0.985
    weight[3, 32:64] = 0
    for search in (False, True):
        assert int(fp4.fit(weight, scheme, search=search)["exponents"][3, 1]) == 0


@pytest.mark.parametrize("text", ["fp8:g32", "fp8:row", "fp8_e5m2:g32:sym:bf16", "fp8:24x32"])
def test_scales_of_fp8_are_searched_up_to_twice_the_covering_one(text: str) -> None:
    rows = 64
    weight, importance = hard(rows, 256, 32)
    weight[:, ::32] /= 8
    scheme = parse(text)
    if "x" in text:  # the last tile has 16 rows and is filled up with zeros
        padded = torch.nn.functional.pad(weight, (0, 0, 0, 8)).double()
        groups = padded.view(3, 24, 8, 32).transpose(1, 2).reshape(24, -1).numpy()
        weights = importance.double().view(1, 8, 1, 32).expand(3, 8, 24, 32).reshape(24, -1).numpy()
    else:
        groups, weights = parts(weight, importance, scheme.group_size(256))
    kept = torch.bfloat16 if "bf16" in text else torch.float32

    def stored(scales: Array) -> Array:
        return torch.from_numpy(scales).float().to(kept).double().numpy()

    grid = torch.float8_e5m2 if "e5m2" in text else torch.float8_e4m3fn
    levels = torch.arange(256, dtype=torch.uint8).view(grid).double()
    levels = levels[levels.isfinite()].unique().numpy()
    start = stored(abs(groups).max(1) / levels[-1])
    result = fp8.fit(weight, scheme, importance, search=True)["scales"]
    factors = [2 ** (step / 8) for step in range(1, 9)]
    expected = slow(groups, weights, start, levels, factors, stored)
    assert result.dtype == kept
    assert agreement(result, expected) > 0.985


def test_the_last_candidate_of_fp8_is_twice_the_covering_scale() -> None:
    importance = torch.tensor([1e-12, 1, 1, 1])
    # One counts as a subnormal step
    weight = torch.tensor([[448.0, 0, 0, 0]]).mul(2**9).repeat(2, 1)
    weight[0, 1:] = torch.tensor([0.37, 2.33, 1.75])  # best is twice the step
    weight[1, 1:] = torch.tensor([6.73, 9.4, 8.84])  # and here would be 2.27 times
    groups, weights = parts(weight, importance, 4)
    factors = [2 ** (step / 8) for step in range(1, 9)]
    start = abs(groups).max(1) / 448
    result = fp8.fit(weight, parse("fp8:g4"), importance, search=True)["scales"]
    expected = slow(groups, weights, start, both(E4M3), factors)
    assert agreement(result, expected) == 1
    assert (result.flatten() / 2**9).tolist() == pytest.approx([2.04, 1.31], abs=0.01)


def test_without_search_the_scale_covers_the_range() -> None:
    weight, importance = hard(48, 64, 32)
    peaks = weight.view(48, 2, 32).abs().amax(-1)
    for options in (None, importance):
        result = fp8.fit(weight, parse("fp8:g32"), options)["scales"]
        assert torch.equal(result, peaks / 448)
        result = fp4.fit(weight, parse("mxfp8"), options)["exponents"]
        assert torch.equal(torch.pow(2.0, result.float() - 127), peaks.log2().floor().sub(8).exp2())


def test_one_scale_of_fp8_serves_a_matrix_of_any_width() -> None:
    weight = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.5, -7.0]])
    result = fp8.fit(weight, parse("fp8:tensor"))["scales"]
    assert result.tolist() == [[7 / 448]]


def test_exponents_follow_the_rule_of_the_standard() -> None:
    """The exponent of the largest magnitude less that of the largest element: 2 for e2m1, 8 for e4m3."""
    peaks = torch.tensor([0, 2.0**-149, 1e-38, 1 - 2.0**-24, 1, 3.99, 4, 6, 7.99, 8, 3.4e38])
    by_rule = [-1000, -149, -127, -1, 0, 1, 2, 2, 2, 3, 127]
    for grid, largest in (("mxfp4", 2), ("mxfp8", 8)):
        expected = [max(exponent - largest + 127, 0) for exponent in by_rule]
        assert fp4.e8m0_exponents(peaks, grid).tolist() == expected
