"""Searches of integer scales equal a slow search in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantforge.grids import PerTensor
from quantforge.notation import parse
from quantforge.packers import integer, scale_loops, scale_search
from quantforge.packers import row_encoding as rows
from quantforge.scheme import Scheme
from tests.thorough import parametrize_each_value

Array = NDArray[numpy.float64]
PARTS = numpy.linspace(1.05, 0.4, 14)  # of the plain scale, in the order in which they are tried


def hard(rows: int = 48, columns: int = 96) -> tuple[Tensor, Tensor]:
    """Groups of 12 with an outlier that counts little, on either side, and some that hold one sign or a tail alone."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(rows, columns, generator=generator)
    weight[:, ::12] = 1.5 * weight.view(rows, -1, 12).amax(-1)
    weight[::2] *= -1
    weight[:8] = weight[:8].abs()
    weight[8:16] = -weight[8:16].abs() - 0.5
    importance = torch.rand(columns, generator=generator) + 0.01
    importance[:48:12] = 0.02
    return weight, importance


def slow(
    groups: Array,
    importance: Array,
    plain: tuple[Array, Array],
    scheme: Scheme,
    stored: Callable[[Array], Array],
) -> tuple[Array, Array]:
    """Return the best scales and zeros of groups ``[n, size]``; candidates are tried from the widest on."""
    low, high = integer.code_range(scheme)
    middle = (groups.min(1) + groups.max(1)) / 2

    def codes(scale: Array, zero: Array) -> Array:
        result = numpy.round(groups / scale[:, None])
        return numpy.clip(result, (low - zero)[:, None], (high - zero)[:, None])

    def lost(result: Array, scale: Array) -> Array:
        return (importance * (groups - result * scale[:, None]) ** 2).sum(1)

    def candidates() -> Any:
        for part in PARTS:
            scale = plain[0] * part
            if scheme.symmetric:
                yield scale, plain[1]
                yield -scale, plain[1]
            else:
                centre = numpy.round(high / 2 - middle / scale)
                for zero in (centre - 1, centre, centre + 1):
                    yield scale, numpy.clip(zero, 1, high)  # the first GPTQ layout has no zero 0
        for _ in range(2):
            yield best, zeros

    best, zeros = plain
    least = lost(codes(best, zeros), best)
    for scale, zero in candidates():
        result = codes(scale, zero)
        squares = (importance * result**2).sum(1)
        products = (importance * groups * result).sum(1)
        fitted = stored(products / numpy.where(squares, squares, 1))
        error = lost(result, fitted)
        better = (error < least) & (fitted != 0)
        best, zeros = numpy.where(better, fitted, best), numpy.where(better, zero, zeros)
        least = numpy.where(better, error, least)
    return best, zeros


def expected(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> tuple[Array, Array]:
    """Scales and zeros by the slow search, from the plain ones."""
    size = (
        weight.numel()
        if isinstance(scheme.granularity, PerTensor)
        else scheme.group_size(weight.shape[1])
    )
    counted = torch.ones(weight.shape[1]) if importance is None else importance
    plain = integer.fit(weight, scheme)
    kept = plain["scales"].dtype

    def stored(scales: Array) -> Array:
        return torch.from_numpy(scales).float().to(kept).double().numpy()

    scales = plain["scales"].double().flatten().numpy()
    zeros = plain["zeros"].double().flatten().numpy() if "zeros" in plain else 0 * scales
    groups = weight.double().reshape(-1, size).numpy()
    weights = counted.double().expand(weight.shape).reshape(-1, size).numpy()
    return slow(groups, weights, (scales, zeros), scheme, stored)


def agreement(result: Tensor, reference: Array) -> float:
    """The share of numbers that are the same but for rounding: near ties may fall otherwise."""
    return float(
        numpy.isclose(result.double().flatten().numpy(), reference, rtol=2e-5, atol=0).mean()
    )


@parametrize_each_value(
    ("weighted", [True, False]),
    (
        "text",
        [
            "int2:g12:sym:f32",
            "int3:g12:asym:f32",
            "int4:g12:sym:f16",
            "int4:g12:asym:bf16",
            "int3:row:sym:f32",
            "int4:row:asym:f16",
            "int3:tensor:sym:f32",
            "int2:tensor:asym:f32",
        ],
    ),
)
def test_scales_and_zeros_equal_a_slow_search(text: str, weighted: bool) -> None:
    weight, importance = hard()
    scheme = parse(text)
    chosen = importance if weighted else None
    scales, zeros = expected(weight, scheme, chosen)
    result = integer.fit(weight, scheme, chosen, search=True)
    assert agreement(result["scales"], scales) > 0.97
    if not scheme.symmetric:
        assert agreement(result["zeros"], zeros) > 0.97


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the loops for large matrices are given; Python itself runs them, because compiling takes seconds."""

    def uncompiled(loop: Any = None, **options: object) -> Any:
        del options
        return loop or uncompiled

    def search(groups: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        calls.append(groups)
        return result(groups, *rest)

    calls: list[Tensor] = []
    result = scale_loops.search_integer_scales
    monkeypatch.setattr(numba, "njit", uncompiled)
    monkeypatch.setattr(scale_loops, "_compiled_search", scale_loops._compiled_search.__wrapped__)
    monkeypatch.setattr(scale_loops, "search_integer_scales", search)
    return calls


@parametrize_each_value(
    ("weighted", [True, False]),
    (
        "text",
        ["int3:g12:sym:f32", "int3:g12:asym:f16", "int3:tensor:sym:f32", "int3:tensor:asym:f32"],
    ),
)
def test_loops_for_large_matrices_equal_the_torch_search(
    text: str, weighted: bool, looped: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, importance = (part[..., 24:60].contiguous() for part in hard(20))
    scheme, chosen = parse(text), importance if weighted else None
    scales, zeros = expected(weight, scheme, chosen)
    plain, groups = integer.fit(weight, scheme), integer._split_groups(weight, scheme)
    weights, (low, high) = integer._split_importance(chosen, groups), integer.code_range(scheme)
    for large in (False, True):
        monkeypatch.setattr(rows, "COMPILED_FROM", weight.numel() + (not large))
        result: tuple[Tensor, ...]
        if scheme.symmetric:
            result = (scale_search.search_scales(groups, plain["scales"], weights, low, high),)
        else:
            middles = plain["zeros"].float()
            result = scale_search.search_scales_and_zeros(
                groups, plain["scales"], middles, weights, 1, high
            )
        assert len(looped) == (large and "tensor" not in text)  # they know groups of one row only
        for actual, reference in zip(result, (scales, zeros), strict=False):
            assert agreement(actual, reference) > 0.97
