"""Stored codes and scales are always usable, and every refinement lowers the error."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantforge.grids import GRIDS, INTEGER_SCALES, Granularity, PerGroup, PerTensor, Row, Zero
from quantforge.model.statistics import Statistics
from quantforge.packers import integer
from quantforge.quantizers.gptq import gptq
from quantforge.quantizers.gptq.hessian import factorize
from quantforge.recipe import GptqOptions, Rounding
from quantforge.scheme import Scheme


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, Scheme]:
    size, groups, rows = draw(st.integers(1, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    granularity: Granularity = draw(st.sampled_from([PerGroup(size), Row(), PerTensor()]))
    bits, zero = draw(st.integers(2, 8)), draw(st.sampled_from([Zero.NONE, Zero.INT]))
    scheme = Scheme(f"int{bits}", granularity, zero, draw(st.sampled_from(INTEGER_SCALES)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    weight = torch.randn(rows, size * groups, generator=generator)
    weight *= 10.0 ** draw(st.integers(-3, 1))
    kind = draw(st.sampled_from(["as it is", "outlier", "zero row", "zero column", "constant"]))
    if kind == "outlier":
        weight[-1, 0] *= 1000
    elif kind == "zero row":
        weight[0] = 0
    elif kind == "zero column":
        weight[:, -1] = 0
    elif kind == "constant":
        weight[:] = weight[0, 0]
    tokens = draw(st.sampled_from([1, 3, 100]))
    inputs = torch.randn(tokens, size * groups, generator=generator)
    inputs[:, 0] *= draw(st.sampled_from([0.0, 1.0, 100.0]))
    return weight, inputs.T @ inputs / tokens, scheme


@settings(max_examples=150, deadline=None)
@given(_cases(), st.booleans())
def test_integer_codes_and_scales_are_always_usable(
    case: tuple[Tensor, Tensor, Scheme], search: bool
) -> None:
    weight, hessian, scheme = case
    parameters = integer.fit(weight, scheme, hessian.diagonal() + 0.01, search=search)
    scales = parameters["scales"].float()
    assert bool(scales.isfinite().all())
    assert bool((scales != 0).all())
    codes = integer.encode(weight, parameters, scheme)
    low, high = integer.code_range(scheme)
    assert low <= int(codes.min()) <= int(codes.max()) <= high
    decoded = integer.decode(codes, parameters, scheme)
    assert torch.equal(integer.encode(decoded, parameters, scheme), codes)
    if not search:  # nothing but the rounding of the scale itself pushes a weight over the edge
        step = (
            scales.abs()
            .expand(len(weight), -1)
            .repeat_interleave(weight.shape[1] // scales.shape[1], dim=1)
        )
        limits = torch.finfo(parameters["scales"].dtype)
        subnormal = limits.smallest_normal * limits.eps / float(scales.abs().min())
        slack = 0.5 + 2.0**scheme.bits * max(limits.eps, subnormal)
        assert bool(((weight - decoded).abs() <= (slack + 0.01) * step).all())


@settings(max_examples=60, deadline=None)
@given(_cases(), st.sampled_from(["absmax", "search"]))
def test_gptq_and_each_refinement_never_raise_the_error(
    case: tuple[Tensor, Tensor, Scheme], scales: str
) -> None:
    weight, hessian, scheme = case
    results = []
    for sweeps in (0, 1, 2):
        rounding = Rounding(scales=scales, gptq=GptqOptions(refine=sweeps))
        rounded = gptq.round_matrices(
            {"w": weight}, Statistics(hessian=hessian), {"w": scheme}, rounding
        )
        results.append(rounded["w"].tensor)
    shrinkage = GRIDS[scheme.grid].shrinkage
    factor = factorize(hessian, 0.01, torch.arange(len(hessian)), shrinkage)
    if not bool(hessian.any()) or factor is None:
        return

    def errors(decoded: Tensor) -> Tensor:
        outputs = factor.objective.evaluate_float64((weight - decoded).double())[1]
        return (
            outputs.sum(0, keepdim=True) if isinstance(scheme.granularity, PerTensor) else outputs
        )

    first = results[0]
    plain = integer.encode(weight, first.parameters, scheme)
    outputs = [errors(integer.decode(plain, first.parameters, scheme))]
    outputs += [errors(tensor.decode()) for tensor in results]
    noise = 1e-6 * float(factor.objective.evaluate_float64(weight.double())[1].max())
    for before, after in pairwise(outputs):
        assert bool((after <= before * (1 + 1e-4) + noise).all())
