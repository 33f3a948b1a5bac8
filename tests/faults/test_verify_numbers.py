"""Matrices with one defect each, against what plain rounding costs, are found; as methods make them, they are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantforge.grids import ScaleType
from quantforge.model.statistics import Statistics
from quantforge.notation import parse
from quantforge.packers import packer_of
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers import gptq
from quantforge.recipe import Rounding
from quantforge.runtime.kv_cache import CachePeaks
from quantforge.scheme import Activation, Scheme
from quantforge.verification.alone import digest, oddities
from quantforge.verification.deviation import deviation
from quantforge.verification.limits import excesses
from quantforge.verification.ranges import wrong_cache, wrong_input

ROWS, COLUMNS, TOKENS = 96, 256, 200
SCHEMES = (
    "int2:g32:asym", "int3:g64:sym", "int4:g64:sym", "int4:g128:asym", "int8:row:sym", "int6:g64:min",
    "nf4:g64:sym", "fp8_e4m3:row:sym", "fp8_e4m3:128x128:sym", "nvfp4", "mxfp4", "q4_k", "q6_k",
)  # fmt: skip
Change = Callable[[QuantizedTensor], QuantizedTensor]


def matrix() -> tuple[Tensor, Tensor]:
    """A weight whose rows and columns differ in size, and inputs that are correlated, a few of them large."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight = normal(ROWS, COLUMNS) * (1 + 0.5 * normal(ROWS, 1).abs()) / COLUMNS**0.5
    weight *= 1 + 0.3 * normal(1, COLUMNS).abs()
    inputs = normal(TOKENS, 64) @ normal(64, COLUMNS) / 8 + 0.3 * normal(TOKENS, COLUMNS)
    inputs *= (normal(COLUMNS) * 0.5).exp()
    return weight, inputs / inputs.square().mean(1, keepdim=True).sqrt()


def rounded(weight: Tensor, scheme: Scheme, *, search: bool = True) -> QuantizedTensor:
    packer = packer_of(scheme)
    parameters = packer.fit(weight, scheme, search=search)
    return QuantizedTensor(packer.encode(weight, parameters, scheme), parameters, scheme)


def scheme_of(text: str) -> Scheme:
    found = parse(text)
    assert isinstance(found, Scheme)
    return found.stored_as(ScaleType.F16)


def said(found: QuantizedTensor, weight: Tensor, inputs: Tensor | None) -> list[str]:
    apart = deviation(weight, found.decode(), found, inputs)
    return [item.text for item in excesses(apart, found.scheme, wanders=inputs is None)]


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("search", [True, False])
def test_plain_rounding_is_in_order(text, search):
    weight, inputs = matrix()
    found = rounded(weight, scheme_of(text), search=search)
    assert said(found, weight, inputs) == []
    assert said(found, weight, None) == []


@pytest.mark.parametrize(
    "text", ["int2:g32:asym", "int3:g64:sym", "int4:g64:sym", "int4:g64:min", "int8:row:sym"]
)
def test_errors_that_make_up_for_each_other_are_in_order(text):
    """GPTQ moves weights further than rounding does, and the outputs less."""
    weight, inputs = matrix()
    scheme = scheme_of(text)
    statistics = Statistics(tokens=TOKENS, hessian=inputs.T @ inputs / TOKENS)
    found = gptq.round_shared({"w": weight}, statistics, {"w": scheme}, Rounding())
    tensor = found["w"].tensor
    apart = deviation(weight, tensor.decode(), tensor, inputs)
    assert apart.whole < 1
    assert apart.coherence < 1
    assert said(tensor, weight, inputs) == []
    assert said(tensor, weight, None) == []


def scaled(rows: slice, factor: float) -> Change:
    def change(found: QuantizedTensor) -> QuantizedTensor:
        scales = found.parameters["scales"].clone()
        scales[rows] *= factor
        return replace(found, parameters={**found.parameters, "scales": scales})

    return change


def parameters(change: Callable[[Tensor], Tensor]) -> Change:
    def changed(found: QuantizedTensor) -> QuantizedTensor:
        return replace(
            found, parameters={key: change(value) for key, value in found.parameters.items()}
        )

    return changed


def codes(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda found: replace(found, codes=change(found.codes.clone()))


def swapped(dim: int, first: int, second: int) -> Callable[[Tensor], Tensor]:
    def change(values: Tensor) -> Tensor:
        order = torch.arange(values.shape[dim])
        order[[first, second]] = order[[second, first]]
        return values.index_select(dim, order)

    return change


def put(place: tuple[slice | int, slice | int], value: int) -> Callable[[Tensor], Tensor]:
    def change(values: Tensor) -> Tensor:
        values[place] = value
        return values

    return change


EVERY = slice(None)
DEFECTS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "all scales 1.05 times": (scaled(EVERY, 1.05), ("int4:g64:sym", "int4:g128:asym", "int8:row:sym", "nf4:g64:sym")),
    "all scales 0.95 times": (scaled(EVERY, 0.95), ("int4:g64:sym", "int4:g128:asym", "int8:row:sym", "nf4:g64:sym")),
    "a row 1.05 times": (scaled(slice(7, 8), 1.05), ("int8:row:sym",)),
    "a row 1.3 times": (scaled(slice(7, 8), 1.3), ("int4:g64:sym", "nf4:g64:sym", "int8:row:sym")),
    "a row twice": (scaled(slice(7, 8), 2.0), ("int2:g32:asym", "int3:g64:sym")),
    "a row of another sign": (scaled(slice(7, 8), -1.0), ("int2:g32:asym", "int3:g64:sym", "int4:g64:sym")),
    "scales rolled by a row": (parameters(lambda v: v.roll(1, 0)), ("int3:g64:sym", "int4:g64:sym", "int8:row:sym")),
    "groups in reverse": (parameters(lambda v: v.flip(1)), ("int4:g32:sym", "int8:g32:sym")),
    "rows exchanged": (codes(swapped(0, 3, 4)), ("int2:g32:asym", "int4:g64:sym", "int8:row:sym")),
    "columns in pairs exchanged": (codes(lambda c: c.view(ROWS, -1, 2).flip(2).reshape(c.shape)), ("int4:g64:sym",)),
    "a column destroyed": (codes(put((EVERY, 17), 7)), ("int4:g64:sym", "int8:row:sym")),
    "zero points off by one": (
        lambda found: replace(found, parameters={**found.parameters, "zeros": found.parameters["zeros"] + 1}),
        ("int4:g128:asym", "int8:g128:asym")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, (_, texts) in DEFECTS.items() for text in texts]
)
def test_a_defect_is_out_of_its_limit(name, text):
    weight, inputs = matrix()
    found = rounded(weight, scheme_of(text))
    assert said(found, weight, inputs) == []
    assert said(DEFECTS[name][0](found), weight, inputs) != []


def test_columns_are_charged_with_what_they_alone_do():
    """A destroyed column is nearly all of the error; what others make up for is no fault of a column."""
    weight, inputs = matrix()
    found = rounded(weight, scheme_of("int4:g64:sym"))
    bad = codes(put((EVERY, 17), 7))(found)
    apart = deviation(weight, bad.decode(), bad, inputs)
    assert int(apart.columns.argmax()) == 17
    other = torch.cat((apart.columns[:17], apart.columns[18:]))
    assert float(apart.columns[17]) > 20 * float(other.max())


def test_static_inputs_have_the_range_of_the_source():
    _, inputs = matrix()
    peaks = inputs.abs().amax(0)
    for grid, limit in (("int8", 127.0), ("fp8_e4m3", 448.0)):
        activation = Activation(grid, "tensor", dynamic=False)
        fitting = peaks.max() / limit
        for share, wrong in (
            (1.0, False),
            (0.6, False),
            (2.0, False),
            (0.2, False),
            (0.05, True),
            (0.01, True),
        ):
            found = wrong_input(activation, (fitting * share).view(1, 1), inputs, peaks)
            assert (found is not None) is wrong, (grid, share)
    assert wrong_input(activation, (fitting * 1e5).view(1, 1), inputs, peaks)


def test_caches_have_the_range_of_the_source():
    seen = CachePeaks()
    keys = torch.randn(1, 2, 5, 8)
    seen.update(keys, 3 * keys)
    fitting = seen.scales("fp8_head")
    assert [*wrong_cache(fitting, seen)] == []
    assert [*wrong_cache((fitting[0] * 20, fitting[1]), seen)] == []
    assert [which for which, _ in wrong_cache((fitting[0], fitting[1] / 4), seen)] == ["v"]
    assert [which for which, _ in wrong_cache((fitting[0] * 1e4, fitting[1]), seen)] == ["k"]


@pytest.mark.parametrize("kind", ["fp8", "fp8_head"])
def test_any_scale_covers_keys_that_are_zero(kind):
    seen = CachePeaks()
    values = torch.randn(1, 2, 5, 8)
    seen.update(torch.zeros_like(values), values)
    assert [*wrong_cache(seen.scales(kind), seen)] == []


@pytest.mark.parametrize("text", SCHEMES)
def test_without_a_source_nothing_is_odd_about_plain_rounding(text):
    weight, _ = matrix()
    weight[:, 5] = 0  # a column that never learned anything
    found = rounded(weight, scheme_of(text))
    assert [*oddities(found)] == []
    assert digest(found) == digest(rounded(weight, scheme_of(text)))


def test_without_a_source_constant_codes_are_odd():
    weight, _ = matrix()
    found = rounded(weight, scheme_of("int4:g64:sym"))
    for place, what in (((EVERY, 17), "column 17"), ((9, EVERY), "row 9")):
        bad = codes(put(place, 5))(found)
        assert [text.startswith(what) for _, text in oddities(bad)] == [True]
        assert digest(bad) != digest(found)
    assert digest(codes(lambda c: c.zero_())(found)) is None
