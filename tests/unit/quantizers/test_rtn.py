"""Rounding to nearest: what it minimises, reports and refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.grids import ScaleType
from quantforge.model.statistics import Statistics
from quantforge.notation import parse
from quantforge.packers import integer
from quantforge.quantizers import Rounded, rtn
from quantforge.quantizers.gptq import gptq
from quantforge.recipe import Rounding

WEIGHT = torch.randn(16, 96, generator=torch.Generator().manual_seed(0)) * 0.1
SQUARES = torch.rand(96, generator=torch.Generator().manual_seed(1)) ** 4


def _round(weight: Tensor, scheme: str, scales: str, squares: Tensor | None = None) -> Rounded:
    rounding, schemes = Rounding(scales=scales), {"w": parse(scheme)}
    return rtn.round_matrices({"w": weight}, Statistics(squares=squares), schemes, rounding)["w"]


def _error(rounded: Rounded, squares: Tensor) -> float:
    return float((WEIGHT - rounded.tensor.decode()).square().sum(0) @ squares)


def test_absmax_ignores_statistics() -> None:
    scheme = parse("int4:g32:sym:f16")
    parameters = integer.fit(WEIGHT, scheme)
    for squares in (None, SQUARES):
        tensor = _round(WEIGHT, "int4:g32:sym", "absmax", squares).tensor
        assert torch.equal(tensor.parameters["scales"], parameters["scales"])
        assert torch.equal(tensor.codes, integer.encode(WEIGHT, parameters, scheme))


@pytest.mark.parametrize(
    "scheme", ["int4:g32:sym", "int3:row:asym", "int2:g96:sym", "int4:tensor:sym"]
)
def test_search_lowers_error_and_importance_lowers_weighted_error(scheme: str) -> None:
    plain, blind = (_round(WEIGHT, scheme, scales) for scales in ("absmax", "search"))
    informed = _round(WEIGHT, scheme, "search", SQUARES)
    even = torch.ones(96)
    assert _error(blind, even) < 0.95 * _error(plain, even)
    assert _error(informed, SQUARES) < _error(blind, SQUARES)
    assert _error(informed, even) > _error(blind, even)


def test_hessian_diagonal_serves_as_importance() -> None:
    rounding, schemes = Rounding(), {"w": parse("int3:g32:sym")}
    hessian = Statistics(hessian=torch.diag(SQUARES))
    by_hessian = rtn.round_matrices({"w": WEIGHT}, hessian, schemes, rounding)["w"].tensor
    by_squares = _round(WEIGHT, "int3:g32:sym", "search", SQUARES).tensor
    assert torch.equal(by_hessian.codes, by_squares.codes)


def test_columns_without_activations_are_still_rounded_well() -> None:
    squares = SQUARES.clone()
    squares[32:64] = 0
    for observed in (squares, torch.zeros(96)):
        rounded = _round(WEIGHT, "int4:g32:sym", "search", observed)
        error = (WEIGHT - rounded.tensor.decode())[:, 32:64].square().mean()
        assert float(error) < 0.02 * float(WEIGHT[:, 32:64].square().mean())


def test_reported_error_is_weighted_and_relative() -> None:
    rounded = _round(WEIGHT, "int4:g32:sym", "search", SQUARES)
    importance = rtn.floor_importance(SQUARES)
    size = float(WEIGHT.square().sum(0) @ importance)
    assert rounded.figures["error"] == pytest.approx(_error(rounded, importance) / size, rel=1e-4)
    assert _round(torch.zeros(2, 96), "int4:g32:sym", "search").figures == {"error": 0.0}


def test_every_matrix_gets_its_own_scheme_and_a_scale_type() -> None:
    weights = {"a": WEIGHT, "b": WEIGHT[:3]}
    schemes = {"a": parse("int4:g32:sym"), "b": parse("int8:row:asym:bf16")}
    rounded = rtn.round_matrices(weights, Statistics(), schemes, Rounding())
    assert list(rounded) == ["a", "b"]
    assert rounded["a"].tensor.scheme == schemes["a"].with_scale(ScaleType.F16)
    assert rounded["b"].tensor.parameters["scales"].dtype == torch.bfloat16
    assert rounded["b"].tensor.parameters["zeros"].shape == (3, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_read_in_the_type_they_are_stored_in(dtype: torch.dtype) -> None:
    stored = WEIGHT.to(dtype)
    first, second = (
        _round(weight, "int4:g32:sym", "search") for weight in (stored, stored.float())
    )
    assert torch.equal(first.tensor.codes, second.tensor.codes)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_named(value: float) -> None:
    weight = WEIGHT.clone()
    weight[5, 7] = value
    with pytest.raises(InputError, match=r"w: the value at \[5, 7\]") as caught:
        _round(weight, "int4:g32:sym", "search")
    assert caught.value.tensor == "w"


def test_rows_that_underflow_are_an_event_and_zero_rows_are_not() -> None:
    weight = WEIGHT.clone()
    weight[0] = 0
    assert _round(weight, "int4:g32:sym:f16", "search").events == ()
    weight[1:3] *= 1e-12
    (event,) = _round(weight, "int4:g32:sym:f16", "search").events
    assert (event.kind, event.where) == ("scale-clamped", "w")
    assert event.detail.startswith("2 rows")
    assert _round(weight, "int4:g32:sym:f32", "search").events == ()


@pytest.mark.parametrize(
    "scheme", ["int4:g32:sym", "int3:row:asym", "nf4:g64", "q4_0", "q4_k", "int8:g32:sym"]
)
def test_outlier_that_wipes_out_its_group_is_an_event(scheme: str) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = 0.01 * torch.randn(20, 256, generator=generator)
    heavy = weight / torch.rand(20, 256, generator=generator).clamp(min=0.05)  # tails, to 20 times
    assert _round(heavy, scheme, "search").events == ()
    weight[3, 40] = 1e4
    (event,) = _round(weight, scheme, "search").events
    assert (event.kind, event.where) == ("group-outlier", "w")
    assert event.detail.startswith("1 groups of ")
    statistics = Statistics(hessian=torch.eye(256))
    rounding = Rounding()
    result = gptq.round_matrices({"w": weight}, statistics, {"w": parse(scheme)}, rounding)["w"]
    assert [event.kind for event in result.events] == ["group-outlier"]


def test_a_scale_beyond_its_type_names_the_matrix() -> None:
    with pytest.raises(InputError, match=r"w: a scale of .* is beyond the range"):
        _round(WEIGHT * 1e8, "int4:g32:sym:f16", "search")
