"""No row rounded with GPTQ has a larger error than with RTN under the same recipe."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantforge.grids import GGML_BLOCKS, GRIDS, PerTensor, Tile
from quantforge.model.statistics import Statistics
from quantforge.notation import parse
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers import awq, rtn, smooth
from quantforge.quantizers.gptq import gptq, rtn_fallback
from quantforge.quantizers.gptq.hessian import Factor, factorize
from quantforge.recipe import AwqOptions, GptqOptions, Rounding
from quantforge.scheme import LayerScheme, Scheme
from tests.conftest import Tiny
from tests.thorough import mark_others_thorough
from tests.unit.quantizers.test_awq import first_block, layers_of, observed

SCHEMES = [
    *("int2:g16:asym", "int3:g32:sym:bf16", "int4:g16:sym", "int4:g32:asym", "int4:g16:min"),
    *("int8:row:sym", "int4:row:asym:f32", "int4:tensor:sym", "int8:tensor:asym"),
    *("nf4:g16", "nf4:g16:sym:double", "fp4:g32", "nvfp4", "mxfp8"),
    *("fp8_e4m3:row", "fp8_e5m2:g16", "fp8_e4m3:tensor", "fp8_e4m3:4x16"),
    *GGML_BLOCKS,
]
KINDS = ["as it is", "outlier rows", "outlier columns", "outlier weight", "zeros", "low rank", "huge ranges",
         "constant", "on the grid", "duplicated columns"]  # fmt: skip


def _hostile(rows: int, columns: int, kind: str, generator: torch.Generator) -> Tensor:
    """A matrix of some kind; of inputs the rows are tokens."""
    matrix = torch.randn(rows, columns, generator=generator)
    few = torch.randperm(columns, generator=generator)[: columns // 16]
    if kind == "outlier rows":
        matrix[::3] *= 1e3
    elif kind == "outlier columns":
        matrix[:, few] *= 50
    elif kind == "outlier weight":
        matrix[0, few[0]] = 1e4
    elif kind == "zeros":
        matrix[:, few], matrix[0] = 0, 0
    elif kind == "low rank":
        matrix = matrix[:, :2] @ torch.randn(2, columns, generator=generator)
    elif kind == "huge ranges":
        matrix *= 10.0 ** torch.linspace(-2, 2, columns)
    elif kind == "constant":
        matrix[:] = matrix[:, :1]
    elif kind == "on the grid":
        matrix = (matrix * 4).round() / 4
    elif kind == "duplicated columns":
        matrix[:, columns // 2 :] = matrix[:, : columns // 2]
    return matrix


@st.composite
def _cases(draw: st.DrawFn, columns: int) -> tuple[dict[str, Tensor], Tensor, Rounding]:
    """Two matrices that hold rows of all kinds (or are of one), a Hessian, and options."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    kinds = draw(st.one_of(st.just(KINDS), st.sampled_from(KINDS).map(lambda kind: [kind])))
    weights = {
        name: 0.02 * torch.cat([_hostile(rows, columns, kind, generator) for kind in kinds])
        for name, rows in (("w", draw(st.sampled_from([1, 5]))), ("v", 3))
    }
    tokens = draw(st.sampled_from([1, 3, 400]))
    inputs = _hostile(tokens, columns, draw(st.sampled_from(KINDS)), generator)
    options = GptqOptions(refine=draw(st.sampled_from([0, 2])))
    scales = draw(st.sampled_from(["search", "absmax"]))
    return weights, inputs.T @ inputs / tokens, Rounding(scales=scales, gptq=options)


# A grid of each kind with scales of each kind.
FEW = ("int2:g16:asym", "int4:row:asym:f32", "int4:tensor:sym", "int4:g16:min", "nf4:g16:sym:double", "nvfp4", "mxfp8",
       "fp8_e4m3:row", "fp8_e4m3:tensor", "fp8_e4m3:4x16", "q4_0", "q3_k", "q4_k", "iq4_xs", "tq2_0", "mxfp4",
       "iq2_xxs", "iq3_s")  # fmt: skip


@pytest.mark.parametrize("grid", mark_others_thorough(SCHEMES, *FEW))
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_no_gptq_row_is_worse_than_rtn(grid: str, data: st.DataObject) -> None:
    scheme = parse(grid)
    weights, hessian, rounding = data.draw(_cases(scheme.block.columns if scheme.block else 32))
    schemes = dict.fromkeys(weights, scheme)
    _no_row_is_worse(weights, Statistics(hessian=hessian), schemes, rounding)


@pytest.mark.parametrize(
    ("transform", "grid"),
    mark_others_thorough(
        [
            (awq, "int4:g16:asym"),
            (awq, "nf4:g16"),
            (smooth, "int4:g32:sym"),
            (smooth, "fp8_e4m3:row"),
        ],
        *((awq, "int4:g16:asym"), (smooth, "fp8_e4m3:row")),
    ),
)
def test_no_gptq_row_is_worse_than_rtn_after_a_transform(
    tiny: Tiny, transform: ModuleType, grid: str
) -> None:
    generator, scheme = torch.Generator().manual_seed(7), parse(grid)
    rounding = Rounding(awq=AwqOptions(search_samples=2))
    with first_block(tiny("llama")) as part:
        layers = layers_of(part, LayerScheme(scheme))
        for name, kind in zip(layers, KINDS, strict=False):
            part.set_weight(name, 0.02 * _hostile(*part.weight(name).shape, kind, generator))
        statistics, _, figures = transform.apply(part, observed(part), layers, rounding)
        assert figures
        for shared in part.inputs:
            weights = {name: part.weight(name).clone() for name in shared.linears}
            mine = dict.fromkeys(weights, scheme)
            _no_row_is_worse(weights, statistics[shared.key], mine, rounding)


@pytest.mark.parametrize(
    "grid",
    mark_others_thorough(
        ["int4:g16:asym", "nf4:g16", "fp8_e4m3:4x16", "int4:tensor:sym", "q4_0"],
        *("int4:g16:asym", "fp8_e4m3:4x16", "int4:tensor:sym"),
    ),
)
def test_row_choice_from_few_columns_equals_full_comparison(
    grid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, scheme = torch.Generator().manual_seed(3), parse(grid)
    weight = 0.02 * torch.cat([_hostile(8, 512, kind, generator) for kind in KINDS])
    inputs = _hostile(600, 512, "outlier columns", generator)
    statistics = Statistics(hessian=inputs.T @ inputs / len(inputs))

    def rounded() -> QuantizedTensor:
        return gptq.round_matrices({"w": weight}, statistics, {"w": scheme}, Rounding())["w"].tensor

    usual = rounded()
    monkeypatch.setattr(rtn_fallback, "_candidate_rows", lambda error, *_: torch.arange(len(error)))
    monkeypatch.setattr(Factor, "is_total_below", lambda *_: True)
    full = rounded()
    assert torch.equal(usual.codes.view(torch.uint8), full.codes.view(torch.uint8))
    for key, value in full.parameters.items():
        assert torch.equal(usual.parameters[key], value)


def _no_row_is_worse(
    weights: dict[str, Tensor],
    statistics: Statistics,
    schemes: dict[str, Scheme],
    rounding: Rounding,
) -> None:
    """Round by both methods and compare, where rows share parameters in the sum over these rows."""
    hessian = statistics.hessian
    output = gptq.round_matrices(weights, statistics, schemes, rounding)
    squares = statistics.importance if rounding.weighs else None
    plain = rtn.round_matrices(weights, Statistics(squares=squares), schemes, rounding)
    shrinkage = max(GRIDS[scheme.grid].shrinkage for scheme in schemes.values())
    factor = factorize(hessian, rounding.gptq.damping, torch.arange(len(hessian)), shrinkage)
    if factor is None:  # then it is plain rounding
        return
    totals: list[list[Tensor]] = [[], []]
    for name, weight in weights.items():
        mine, other = output[name].tensor, plain[name].tensor
        for result, tensor in zip(totals, (mine, other), strict=True):
            errors = factor.objective.evaluate_float64(weight.double() - tensor.decode().double())
            result.append(_summed(errors, mine, other))
    if next(iter(schemes.values())).is_joint and all(each.shape[1] == 1 for each in totals[0]):
        totals = [[torch.stack(result).sum(0)] for result in totals]
    sizes = [weight.double().square().sum() for weight in weights.values()]
    noise = 1e-13 * hessian.double().diagonal().sum() * max(sizes)
    # Both are computed in float64 here and there: what may differ is the order of the sums.
    for one, two in zip(*totals, strict=True):
        assert bool((one <= two * (1 + 1e-9) + noise).all())


def _summed(errors: Tensor, mine: QuantizedTensor, other: QuantizedTensor) -> Tensor:
    """Add up errors ``[2, out]`` of rows that can be exchanged only together: they share what differs."""
    granularity = mine.scheme.granularity
    if isinstance(granularity, Tile):
        return torch.stack([band.sum(1) for band in errors.split(granularity.rows, dim=1)], 1)
    shared = ["divisor", "nested", "offset"]
    if isinstance(granularity, PerTensor):
        shared += ["scales", "zeros"]
    pairs = [
        (mine.parameters[key], other.parameters[key]) for key in shared if key in mine.parameters
    ]
    return errors if all(torch.equal(*pair) for pair in pairs) else errors.sum(1, keepdim=True)
