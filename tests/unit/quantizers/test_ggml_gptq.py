"""GPTQ into ggml blocks: refinement gains what it reports, and parameters stay as stored."""

from dataclasses import replace

import pytest
import torch

from quantforge.model.statistics import Statistics
from quantforge.notation import parse
from quantforge.packers.ggml.blocks import pack_blocks, unpack_blocks
from quantforge.packers.ggml.grid import CODE_RANGES
from quantforge.packers.ggml.packer import fit
from quantforge.quantizers import rtn
from quantforge.quantizers.gptq import column_loops, gptq
from quantforge.quantizers.gptq.hessian import Objective
from quantforge.quantizers.gptq.refine import Refinement
from quantforge.recipe import Rounding
from tests.thorough import mark_others_thorough

ENCODED = sorted(CODE_RANGES)


def problem(rows=24, columns=512):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    x = torch.randn(4096, 64, generator=generator) @ torch.randn(64, columns, generator=generator)
    x += torch.randn(4096, columns, generator=generator)
    return weight, x.T @ x / len(x)


def objective(weight, tensor, hessian):
    error = (weight - tensor.decode()).double()
    return (error @ hessian.double() * error).sum(1)


def rounded(method, grid, weight, hessian, refine=2):
    rounding = Rounding()
    rounding = replace(rounding, gptq=replace(rounding.gptq, refine=refine))
    statistics = Statistics(tokens=4096, hessian=hessian)
    return method.round_matrices({"w": weight}, statistics, {"w": parse(grid)}, rounding)["w"]


@pytest.mark.parametrize("grid", mark_others_thorough(ENCODED, *ENCODED[::2]))
def test_refined_gptq_beats_gptq_beats_rounding(grid):
    weight, hessian = problem()
    plain, once, refined = (
        objective(weight, result.tensor, hessian)
        for result in (
            rounded(rtn, grid, weight, hessian),
            rounded(gptq, grid, weight, hessian, 0),
            rounded(gptq, grid, weight, hessian),
        )
    )
    assert 0.02 * plain.sum() < once.sum() < 0.75 * plain.sum()
    assert 0.3 * once.sum() < refined.sum() < 0.97 * once.sum()


@pytest.mark.parametrize("grid", mark_others_thorough(ENCODED, *ENCODED[1::2]))
def test_sweep_gain_is_as_reported_and_no_row_loses(grid):
    weight, hessian = problem()
    scheme, ridge = parse(grid), 0.01 * hessian.diagonal().mean()
    goal = Objective(hessian, ridge.expand(len(hessian)))
    result = rounded(gptq, grid, weight, hessian, 0).tensor
    before = goal.evaluate_float64((weight - result.decode()).double())[1]
    state = Refinement(weight, goal, scheme, result.parameters, result.codes)
    gained = state.sweep()
    again = replace(result, codes=state.codes, parameters=state.parameters)
    after = goal.evaluate_float64((weight - again.decode()).double())[1]
    assert bool((gained >= -1e-6 * before).all())
    assert torch.allclose(before - after, gained, rtol=1e-3, atol=1e-4 * float(before.mean()))


@pytest.mark.parametrize("grid", mark_others_thorough(ENCODED, *ENCODED[::2]))
def test_refined_parameters_are_stored_exactly(grid):
    weight, hessian = problem(5)
    tensor = rounded(gptq, grid, weight, hessian).tensor
    again = unpack_blocks(pack_blocks(tensor), tensor.scheme)
    assert torch.equal(again.codes, tensor.codes)
    assert torch.equal(again.decode(), tensor.decode())
    expected = fit(weight, tensor.scheme)
    assert {key: value.dtype for key, value in tensor.parameters.items()} == {
        key: value.dtype for key, value in expected.items()
    }


@pytest.mark.parametrize("grid", mark_others_thorough(ENCODED, *ENCODED[::4]))
def test_numpy_and_compiled_loops_round_as_torch(grid, monkeypatch):
    weight, hessian = problem()
    weight[3] = 0
    with monkeypatch.context() as patch:
        patch.setattr(column_loops, "loops_for", lambda *_: None)
        plain = rounded(gptq, grid, weight, hessian).tensor
    arrays = rounded(gptq, grid, weight, hessian).tensor
    monkeypatch.setattr(column_loops, "COMPILED_FROM", 1)
    result = rounded(gptq, grid, weight, hessian).tensor
    assert torch.equal(result.codes, arrays.codes)
    assert torch.equal(result.decode(), arrays.decode())
    assert result.codes.dtype == plain.codes.dtype
    # Sums in another order: a near tie that falls otherwise leads its row elsewhere.
    assert (result.codes == plain.codes).all(1).float().mean() > 0.8
    first, second = (objective(weight, tensor, hessian).sum() for tensor in (plain, result))
    assert float(second) == pytest.approx(float(first), rel=0.02)


@pytest.mark.parametrize("grid", ["q8_0", "q4_0", "q4_1", "q4_k", "q6_k", "iq4_xs"])
def test_float16_scale_underflow_is_an_event_unless_all_zero(grid):
    weight, hessian = problem(3)
    weight[1, 256:] = 0
    assert rounded(rtn, grid, weight, hessian).events == ()
    weight[1, 256:] = 1e-10 * weight[2, 256:]
    (event,) = rounded(rtn, grid, weight, hessian).events
    assert event.kind == "scale-clamped"
    lost = 256 // parse(grid).block.columns
    assert event.detail == f"{lost} blocks are below f16 and decode to 0"
