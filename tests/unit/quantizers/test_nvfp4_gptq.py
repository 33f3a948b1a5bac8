"""GPTQ into NVFP4: scales are refitted under a fixed divisor, and each row keeps its best run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quantforge.grids import GRIDS
from quantforge.model.statistics import Statistics
from quantforge.notation import parse
from quantforge.packers import fp4
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers import rtn
from quantforge.quantizers.gptq import column_loops, gptq
from quantforge.quantizers.gptq.hessian import Objective, factorize
from quantforge.quantizers.gptq.refine import Refinement
from quantforge.recipe import GptqOptions, Rounding

SCHEME = parse("nvfp4")


def problem(rows: int = 48, columns: int = 128) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(2000, 32, generator=generator) @ torch.randn(
        32, columns, generator=generator
    )
    inputs += torch.randn(2000, columns, generator=generator)
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs / len(inputs)


def goal(hessian: Tensor) -> Objective:
    return Objective(hessian, (0.01 * hessian.diagonal().mean()).expand(len(hessian)))


def rounded(
    weight: Tensor, hessian: Tensor, refine: int = 2, scales: str = "search"
) -> QuantizedTensor:
    rounding = Rounding(scales=scales, gptq=GptqOptions(refine=refine))
    statistics = Statistics(tokens=2000, hessian=hessian)
    return gptq.round_matrices({"w": weight}, statistics, {"w": SCHEME}, rounding)["w"].tensor


def test_points_match_the_encoder_including_ties() -> None:
    weight = problem()[0]
    parameters = fp4.fit(weight, SCHEME)
    steps = parameters["scales"].float() / parameters["divisor"]
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    weight[:, :14] = torch.cat([middles, -middles]) * steps[:, :1]
    grid = fp4.column_grid(parameters, SCHEME, torch.arange(128))
    assert grid is not None
    assert grid.table is not None
    thresholds, values, codes = grid.table
    places = torch.bucketize((weight.T / grid.scales).contiguous(), thresholds, right=True)
    result = fp4.encode(weight, parameters, SCHEME)
    assert torch.equal(codes[places].T.to(grid.dtype), result)
    assert torch.equal((values[places] * grid.scales).T, fp4.decode(result, parameters, SCHEME))


def test_compiled_loops_round_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = problem()
    result = rounded(weight, hessian)
    monkeypatch.setattr(column_loops, "COMPILED_FROM", 1)
    compiled = rounded(weight, hessian)
    monkeypatch.setattr(column_loops, "loops_for", lambda *_: None)
    plain = rounded(weight, hessian)
    assert torch.equal(result.codes, compiled.codes)
    assert torch.equal(result.decode(), compiled.decode())
    assert float((result.codes == plain.codes).all(1).float().mean()) > 0.8


@pytest.mark.parametrize("scales", ["absmax", "search"])
def test_sweep_gain_is_as_reported_and_no_row_loses(scales: str) -> None:
    weight, hessian = problem()
    tensor, objective = rounded(weight, hessian, 0, scales), goal(hessian)
    before = objective.evaluate_float64((weight - tensor.decode()).double())[1]
    state = Refinement(weight, objective, SCHEME, tensor.parameters, tensor.codes)
    gained = state.sweep()
    again = replace(tensor, codes=state.codes, parameters=state.parameters)
    after = objective.evaluate_float64((weight - again.decode()).double())[1]
    assert float(gained.min()) >= 0
    assert torch.allclose(before - after, gained, rtol=1e-3, atol=1e-4 * float(before.mean()))
    assert float(after.sum()) < 0.95 * float(before.sum())
    assert torch.equal(state.parameters["divisor"], tensor.parameters["divisor"])
    changed = state.parameters["scales"].float() != tensor.parameters["scales"].float()
    assert bool(changed.any())


def test_exact_scale_is_found_under_the_divisor() -> None:
    weight, hessian = problem()
    tensor = rtn.quantize_matrices({"w": weight}, None, {"w": SCHEME}, "absmax")["w"]
    expected = tensor.decode()
    moved = dict(tensor.parameters)
    moved["scales"] = fp4.round_scales_to_e4m3(moved["scales"].float() * 1.25)
    state = Refinement(expected, goal(hessian), SCHEME, moved, tensor.codes)
    state.sweep()
    before = replace(tensor, parameters=moved)
    after = replace(tensor, codes=state.codes, parameters=state.parameters)
    first, left = (
        goal(hessian).evaluate_float64((expected - item.decode()).double())[1]
        for item in (before, after)
    )
    assert float(left.sum()) < 0.05 * float(first.sum())


def test_each_row_has_the_best_of_all_runs_under_one_divisor() -> None:
    weight, hessian = problem()
    factor = factorize(hessian, 0.01, hessian.diagonal().argsort(descending=True))
    assert factor is not None
    assert Rounding().gptq.passes_of(GRIDS["nvfp4"].passes) == 4
    results = []
    for runs in (1, 2, 4):
        rounding = Rounding(gptq=GptqOptions(refine=0, passes=runs))
        results.append(gptq._round_rows("w", factor, SCHEME, rounding, [weight]))
        tensor = QuantizedTensor(results[-1].codes, results[-1].parameters, SCHEME)
        expected = factor.objective.evaluate_float64((weight - tensor.decode()).double())[1]
        assert torch.allclose(results[-1].errors, expected, rtol=1e-3)
        assert torch.equal(tensor.parameters["divisor"], results[0].parameters["divisor"])
    for before, after in pairwise(results):
        better = after.errors < before.errors
        assert bool((after.errors <= before.errors).all())
        assert 0 < int(better.sum()) < len(weight)
