"""GPTQ equals a textbook version in float64 and handles difficult Hessians."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from weakref import ref

import pytest
import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.grids import GRIDS
from quantforge.model.statistics import Statistics
from quantforge.notation import parse
from quantforge.packers import integer
from quantforge.quantizers import Rounded, rtn
from quantforge.quantizers.gptq import gptq
from quantforge.quantizers.gptq.hessian import DAMPING_MULTIPLES, factorize
from quantforge.recipe import GptqOptions, Rounding
from quantforge.scheme import Scheme
from tests.thorough import parametrize_each_value


def _matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _hessian(columns: int, tokens: int = 1000, seed: int = 1) -> Tensor:
    inputs = (
        _matrix(tokens, columns, seed)
        @ _matrix(columns, columns, seed + 1)
        * torch.linspace(0.2, 3, columns)
    )
    return inputs.T @ inputs / tokens


class _Watched:
    """A Hessian that looks, whenever a matrix is made of it, which of the earlier ones are alive."""

    def __init__(self, hessian: Tensor) -> None:
        self.hessian, self.made, self.alive = hessian, list[ref[Tensor]](), list[int]()

    def diagonal(self) -> Tensor:
        return self.hessian.diagonal()

    def __getitem__(self, index: object) -> _Watched:
        self.alive.append(sum(each() is not None for each in self.made))
        return self

    def double(self) -> Tensor:
        result = self.hessian.double()
        self.made.append(ref(result))
        return result


def test_failed_damping_frees_its_matrix_before_the_next() -> None:
    watched = _Watched(-torch.eye(8))
    assert factorize(watched, 0.01, torch.arange(8)) is None  # type: ignore[arg-type]
    assert watched.alive == [0] * len(DAMPING_MULTIPLES)


def _damped(hessian: Tensor, damping: float = 0.01, shrinkage: float = 0.0) -> Tensor:
    diagonal = hessian.double().diagonal()
    return hessian + (shrinkage * diagonal + damping * diagonal.mean()).diag()


def _errors(
    weight: Tensor, rounded: Rounded | Tensor, hessian: Tensor, shrinkage: float = 0.0
) -> Tensor:
    decoded = rounded.tensor.decode() if isinstance(rounded, Rounded) else rounded
    error = (weight - decoded).double()
    return ((error @ _damped(hessian, shrinkage=shrinkage)) * error).sum(1)


def _round(
    weight: Tensor, hessian: Tensor, scheme: str, scales: str = "absmax", **options: object
) -> Rounded:
    rounding = Rounding(scales=scales, gptq=GptqOptions(**{"refine": 0} | options))  # type: ignore[arg-type]
    return gptq.round_matrices(
        {"w": weight}, Statistics(hessian=hessian), {"w": parse(scheme)}, rounding
    )["w"]


def _textbook(weight: Tensor, hessian: Tensor, scheme: Scheme, search: bool) -> Tensor:
    """Algorithm 1 of the paper in float64, one column at a time; then the better of it and plain rounding.

    Plain rounding under its scales, and under those that `rtn` finds.
    """
    plain_hessian, diagonal = hessian.double(), hessian.diagonal()
    damped = _damped(hessian, 0.01, GRIDS[scheme.grid].shrinkage)
    hessian, work = damped, weight.double()
    order = hessian.diagonal().argsort(descending=True, stable=True)
    inverse = torch.linalg.inv(hessian[order][:, order])
    upper = torch.linalg.cholesky(inverse, upper=True)
    left = torch.empty(len(order), dtype=torch.float64)
    left[order] = upper.diagonal() ** -2
    importance = (hessian.diagonal() ** 0.25 * left**0.75).float()
    parameters = integer.fit(weight, scheme, importance, search=search)
    size = scheme.group_size(weight.shape[1])
    low, high = integer.code_range(scheme)
    codes = torch.empty_like(work)
    for index, column in enumerate(order.tolist()):
        group = column // size
        where = min(group, parameters["scales"].shape[1] - 1)
        scale = parameters["scales"][:, where].double()
        zero = parameters["zeros"][:, where].double() if "zeros" in parameters else 0
        codes[:, column] = (work[:, column] / scale + zero).round().clamp(low, high)
        error = (work[:, column] - (codes[:, column] - zero) * scale) / upper[index, index]
        work[:, order[index:]] -= error[:, None] * upper[index, index:]
    plain = integer.encode(weight, parameters, scheme)
    rounded = [integer.decode(each, parameters, scheme) for each in (codes, plain)]
    errors = [(((weight - each).double() @ hessian) * (weight - each)).sum(1) for each in rounded]
    codes = torch.where((errors[1] < errors[0])[:, None], plain, codes)
    result = integer.decode(codes, parameters, scheme)
    importance = diagonal.clamp(min=0.01 * diagonal.mean()) if search else None
    parameters = integer.fit(weight, scheme, importance, search=search)
    alone = integer.encode(weight, parameters, scheme)
    decoded = integer.decode(alone, parameters, scheme)
    for goal in (plain_hessian, hessian):
        errors = [
            (((weight - each).double() @ goal) * (weight - each)).sum(1)
            for each in (result, decoded)
        ]
        if size == weight.shape[1] and scheme.rows_share_parameters:
            errors = [each.sum().expand(len(weight)) for each in errors]
        better = (errors[1] < errors[0])[:, None]
        codes, result = torch.where(better, alone, codes), torch.where(better, decoded, result)
    return codes


@pytest.mark.parametrize("scales", ["absmax", "search"])
@pytest.mark.parametrize(
    "grid", ["int4:g32:sym", "int3:g40:asym", "int2:g80:asym", "int4:row:sym", "int3:tensor:asym"]
)
def test_codes_equal_textbook_gptq(scales: str, grid: str) -> None:
    # One near tie that falls the other way in float32 changes much of its row: many rows, so that it may happen.
    weight, hessian, scheme = _matrix(512, 160), _hessian(160), parse(grid + ":f16")
    expected = _textbook(weight, hessian, scheme, scales == "search")
    rounded = _round(weight, hessian, str(scheme), scales)
    assert float((rounded.tensor.codes == expected).float().mean()) >= 0.999


@pytest.mark.parametrize("scheme", ["int4:g64:sym", "int2:g32:asym"])
def test_gptq_halves_the_error_of_plain_rounding(scheme: str) -> None:
    weight, hessian = _matrix(32, 256), _hessian(256)
    rounded = _round(weight, hessian, scheme)
    plain = rtn.round_matrices(
        {"w": weight}, Statistics(), {"w": parse(scheme)}, Rounding(scales="absmax")
    )["w"]
    assert float(_errors(weight, rounded, hessian).sum()) < 0.6 * float(
        _errors(weight, plain, hessian).sum()
    )


@pytest.mark.parametrize("sweeps", [0, 2])
def test_reported_error_is_the_relative_objective(
    sweeps: int,
) -> None:
    weight, hessian = _matrix(16, 96), _hessian(96)
    rounded = _round(weight, hessian, "int3:g32:asym", "search", refine=sweeps)
    size = weight.double().square() @ _damped(hessian).diagonal()
    expected = _errors(weight, rounded, hessian).sum() / size.sum()
    assert rounded.figures["error"] == pytest.approx(float(expected), rel=1e-4)


@parametrize_each_value(
    ("scales", ["absmax", "search"]),
    (
        "scheme",
        ["int4:g32:sym:f16", "int3:g64:asym:bf16", "int2:row:asym:f16", "int2:g192:sym:bf16"],
    ),
)
def test_each_sweep_of_refinement_lowers_every_row_or_leaves_it(scheme: str, scales: str) -> None:
    weight, hessian = _matrix(24, 192), _hessian(192)
    shrinkage = GRIDS[parse(scheme).grid].shrinkage
    errors = [
        _errors(weight, _round(weight, hessian, scheme, scales, refine=n), hessian, shrinkage)
        for n in range(4)
    ]
    for before, after in pairwise(errors):
        assert bool((after <= before * (1 + 1e-5)).all())
        assert float(after.sum()) < float(before.sum())
    assert float(errors[2].sum()) < 0.97 * float(errors[0].sum())


def test_refinement_of_one_scale_for_all_lowers_the_sum() -> None:
    weight, hessian = _matrix(24, 96), _hessian(96)
    before, after = (
        _errors(weight, _round(weight, hessian, "int4:tensor:asym", refine=n), hessian)
        for n in (0, 2)
    )
    assert float(after.sum()) < 0.99 * float(before.sum())


def _hard(case: str) -> tuple[Tensor, Tensor]:
    weight, hessian = _matrix(5, 33), _hessian(33)
    if case == "one sample":
        sample = _matrix(1, 33, 5)
        hessian = sample.T @ sample
    elif case == "duplicated columns":
        inputs = _matrix(100, 33, 6)
        inputs[:, 20:] = inputs[:, :13]
        hessian = inputs.T @ inputs / 100
    elif case == "an outlier column":
        hessian[7] *= 1e3
        hessian[:, 7] *= 1e3
    elif case == "an outlier weight":
        weight[2, 9] = 1e3
    elif case == "a constant row and a zero row":
        weight[0], weight[1] = 0.37, 0.0
    elif case == "one row":
        weight = weight[:1]
    elif case == "one column":
        weight, hessian = weight[:, :1], hessian[:1, :1]
    return weight, hessian


@pytest.mark.parametrize("scheme", ["int4:row:sym", "int3:g11:asym", "int2:g33:asym"])
@pytest.mark.parametrize(
    "case",
    [
        "one sample",
        "duplicated columns",
        "an outlier column",
        "an outlier weight",
        "a constant row and a zero row",
        "one row",
        "one column",
    ],
)
def test_hard_input_finishes_and_no_row_is_worse_than_plain_rounding(
    case: str, scheme: str
) -> None:
    weight, hessian = _hard(case)
    if weight.shape[1] == 1:
        scheme = scheme.replace("g11", "g1").replace("g33", "g1")
    for sweeps in (0, 2):
        rounded = _round(weight, hessian, scheme, refine=sweeps)
        tensor = _round(weight, hessian, scheme).tensor
        plain = integer.encode(weight, tensor.parameters, tensor.scheme)
        plain = integer.decode(plain, tensor.parameters, tensor.scheme)
        allowed = _errors(weight, plain, hessian) * (1 + 1e-5) + 1e-12
        assert bool((_errors(weight, rounded, hessian) <= allowed).all())
        assert bool(rounded.tensor.decode()[weight.eq(0).all(1)].eq(0).all())


def test_a_dead_channel_is_rounded_plainly_and_counted() -> None:
    weight, hessian = _matrix(8, 64), _hessian(64)
    dead = torch.tensor([3, 40])
    hessian[dead], hessian[:, dead] = 0, 0
    rounded = _round(weight, hessian, "int4:g32:sym")
    tensor = rounded.tensor
    assert [(event.kind, event.where) for event in rounded.events] == [("dead-channels", "w")]
    assert "2 of 64" in rounded.events[0].detail
    plain = integer.encode(weight, tensor.parameters, tensor.scheme)
    assert torch.equal(tensor.codes[:, dead], plain[:, dead])
    assert int(tensor.codes[:, dead].count_nonzero()) > 8


def test_without_activations_rounding_is_plain() -> None:
    weight = _matrix(4, 32)
    rounded = _round(weight, torch.zeros(32, 32), "int4:g32:sym")
    assert [event.kind for event in rounded.events] == ["dead-channels", "rtn-fallback"]
    assert torch.equal(
        rounded.tensor.codes,
        integer.encode(weight, rounded.tensor.parameters, rounded.tensor.scheme),
    )


def test_damping_rises_and_singular_hessian_falls_back() -> None:
    weight, hessian = _matrix(4, 32), torch.eye(32)
    hessian[0, 0] = -0.05
    raised = _round(weight, hessian, "int4:g32:sym")
    assert [(event.kind, event.detail) for event in raised.events] == [
        ("damping-raised", "0.01 raised to 0.1")
    ]
    hessian[0, 0] = -5
    hopeless = _round(weight, hessian, "int4:g32:sym")
    assert [event.kind for event in hopeless.events] == ["rtn-fallback"]
    assert bool(hopeless.tensor.decode().isfinite().all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_named(value: float) -> None:
    weight, hessian = _matrix(4, 32), _hessian(32)
    hessian[5, 5] = value
    with pytest.raises(InputError, match="w: the activations of input column 5"):
        _round(weight, hessian, "int4:g32:sym")
    weight[1, 3] = value
    with pytest.raises(InputError, match=r"w: the value at \[1, 3\]"):
        _round(weight, _hessian(32), "int4:g32:sym")


def test_matrices_of_one_input_round_as_if_alone() -> None:
    weights = {
        "q": _matrix(8, 64),
        "k": _matrix(4, 64, 7),
        "v": _matrix(4, 64, 8),
        "o": _matrix(3, 64, 9),
    }
    schemes = {
        "q": "int4:g32:sym:f16",
        "k": "int4:g32:sym:f16",
        "v": "int3:g32:asym:f16",
        "o": "int4:tensor:sym:f16",
    }
    hessian, rounding = _hessian(64), Rounding()
    together = gptq.round_matrices(
        weights, Statistics(hessian=hessian), {k: parse(v) for k, v in schemes.items()}, rounding
    )
    assert list(together) == list(weights)
    for name, weight in weights.items():
        alone = gptq.round_matrices(
            {name: weight}, Statistics(hessian=hessian), {name: parse(schemes[name])}, rounding
        )[name]
        assert torch.equal(together[name].tensor.codes, alone.tensor.codes)
        for key, value in alone.tensor.parameters.items():
            assert torch.equal(together[name].tensor.parameters[key], value)


def test_rows_do_not_depend_on_their_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, hessian = _matrix(40, 64), _hessian(64)
    whole = _round(weight, hessian, "int3:g32:asym", "search", refine=1)
    monkeypatch.setattr(gptq, "ROWS_PER_PART", 16)
    parts = _round(weight, hessian, "int3:g32:asym", "search", refine=1)
    assert float((whole.tensor.codes == parts.tensor.codes).float().mean()) > 0.99
    assert parts.figures["error"] == pytest.approx(whole.figures["error"], rel=1e-3)
    one = _round(weight, hessian, "int3:tensor:asym", "search", refine=1)
    assert one.tensor.parameters["scales"].shape == (1, 1)


@pytest.mark.parametrize("power", [-5, 4])
def test_power_of_two_factor_changes_only_the_scales(power: int) -> None:
    weight, hessian = _matrix(8, 64), _hessian(64)
    first = _round(weight, hessian, "int3:g32:asym:bf16", "search", refine=2).tensor
    second = _round(weight * 2.0**power, hessian, "int3:g32:asym:bf16", "search", refine=2).tensor
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.parameters["zeros"], second.parameters["zeros"])
    assert torch.equal(
        first.parameters["scales"].float() * 2.0**power, second.parameters["scales"].float()
    )


@pytest.mark.parametrize("scheme", ["int4:g64:sym:f16", "int3:tensor:asym:f32", "nvfp4"])
def test_the_number_of_threads_changes_nothing(scheme: str) -> None:
    weight, hessian = _matrix(240, 192), _hessian(192)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(_round(weight, hessian, scheme, "search", refine=1))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    first, second = (result.tensor for result in results)
    assert torch.equal(first.codes, second.codes)
    for key, value in first.parameters.items():
        assert torch.equal(value, second.parameters[key])
    assert results[0].figures == results[1].figures


def test_factor_is_root_of_the_permuted_damped_hessian() -> None:
    hessian = _hessian(40)
    order = hessian.diagonal().argsort(descending=True)
    factor = factorize(hessian, 0.01, order)
    assert factor is not None
    root = factor.root.double()
    assert torch.equal(root, root.triu())
    assert torch.allclose(root @ root.T, _damped(hessian)[order][:, order], rtol=1e-5, atol=1e-4)
    shrunk = factorize(hessian, 0.01, order, 0.05)
    assert shrunk is not None
    root, expected = shrunk.root.double(), _damped(hessian, shrinkage=0.05)[order][:, order]
    assert torch.allclose(root @ root.T, expected, rtol=1e-5, atol=1e-4)


def test_given_options_are_used_and_not_changed() -> None:
    weight, hessian, rounding = _matrix(8, 64), _hessian(64), Rounding(scales="absmax")
    kept = replace(rounding)
    scheme = {"w": parse("int4:g32:sym")}
    strong = replace(rounding, gptq=GptqOptions(damping=0.9))
    codes = [
        gptq.round_matrices({"w": weight}, Statistics(hessian=hessian), scheme, r)["w"].tensor.codes
        for r in (rounding, strong)
    ]
    assert not torch.equal(*codes)
    assert rounding == kept


def test_shrinkage_reduces_off_diagonal_feedback() -> None:
    weight, hessian = _matrix(64, 192), _hessian(192)

    def errors(shrinkage: float | None) -> tuple[float, float]:
        rounded = _round(weight, hessian, "int2:g64:asym", "search", refine=2, shrinkage=shrinkage)
        missed = (weight - rounded.tensor.decode()).double()
        alone = missed.square() @ hessian.double().diagonal()
        return float(_errors(weight, rounded, hessian).sum()), float(alone.sum())

    none, some, much = errors(0.0), errors(0.05), errors(0.5)
    assert 0.8 * none[0] < some[0] < 1.2 * none[0]
    assert some[0] < much[0]
    assert 0.3 * none[1] < much[1] < some[1] < none[1]
    assert errors(None) == some  # of 2 bits by default


def test_matrices_of_one_input_use_the_largest_shrinkage() -> None:
    weight, hessian = _matrix(16, 128), _hessian(128)
    schemes = {"two": parse("int2:g64:asym"), "four": parse("int4:g64:sym")}
    matrices = dict.fromkeys(schemes, weight)

    def codes(shrinkage: float | None) -> Tensor:
        rounding = Rounding(gptq=GptqOptions(shrinkage=shrinkage))
        result = gptq.round_matrices(matrices, Statistics(hessian=hessian), schemes, rounding)
        return result["four"].tensor.codes

    assert torch.equal(codes(None), codes(0.05))
    assert not torch.equal(codes(None), codes(0.0))
    only = _round(weight, hessian, "int4:g64:sym", "search", refine=2)
    assert torch.equal(only.tensor.codes, codes(0.0))
