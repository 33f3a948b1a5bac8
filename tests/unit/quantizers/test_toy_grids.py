"""Error feedback and refinement work on third-party grids: a table and code vectors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantforge.grids import GRIDS, Row, ScaleType
from quantforge.model.statistics import Statistics
from quantforge.notation import parse
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers import rtn
from quantforge.quantizers.gptq import gptq
from quantforge.quantizers.gptq.hessian import factorize
from quantforge.quantizers.gptq.refine import Refinement
from quantforge.recipe import GptqOptions, Rounding
from tests.toys import lattice, squares


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRIDS, "squares4", squares.RECORD)
    monkeypatch.setitem(GRIDS, "lattice", lattice.RECORD)


def _problem(columns: int = 128) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(48, columns, generator=draw)
    inputs = torch.randn(512, columns, generator=draw)
    inputs @= torch.randn(columns, columns, generator=draw)
    return weight, inputs.T @ inputs / len(inputs)


def _errors(scheme: str, scales: str = "absmax") -> list[float]:
    """Return the squared error under a Hessian by rtn, by gptq, and by gptq refined."""
    weight, hessian = _problem()
    statistics, schemes = Statistics(tokens=512, hessian=hessian), {"w": parse(scheme)}
    errors = []
    for method, refine in ((rtn, 0), (gptq, 0), (gptq, 4)):
        rounding = Rounding(scales, GptqOptions(refine=refine))
        result = method.round_matrices({"w": weight}, statistics, schemes, rounding)["w"].tensor
        error = weight - result.decode()
        errors.append(float((error @ hessian * error).sum()))
    return errors


def test_gptq_on_a_toy_table_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, unrefined, refined = _errors("squares4")
    assert refined < 0.95 * unrefined
    assert unrefined < 0.8 * plain
    monkeypatch.setattr(squares, "column_grid", lambda *_: None)  # column by column instead
    assert _errors("squares4")[2] == pytest.approx(refined, rel=1e-2)


def test_gptq_on_a_toy_lattice_grid() -> None:
    scheme = parse("lattice")
    assert len(lattice.BOOK) == 1 << scheme.bits
    assert scheme.with_scale(ScaleType.F16).bits_per_weight((48, 128)) == 3  # 1 of it scales
    with pytest.raises(ValueError, match="126 columns"):
        replace(scheme, granularity=Row()).groups(126)
    plain, unrefined, refined = _errors("lattice")
    assert refined < 0.95 * unrefined
    assert unrefined < 0.6 * plain
    plain, unrefined, refined = _errors("lattice", "search")
    assert refined < 0.95 * unrefined
    assert unrefined < 0.7 * plain


def test_error_feedback_by_panels_matches_gptq() -> None:
    """Written out in float64 with inverses of the Hessian of the columns that are still to come."""
    scheme, (weight, hessian) = parse("lattice"), _problem(64)
    order = torch.arange(64).view(-1, 4).flip(0).flatten()
    factor = factorize(hessian, 0.01, order)
    assert factor is not None
    parameters = lattice.fit(weight, scheme)
    result = gptq.round_columns(weight, factor, scheme, parameters, keep_terms=True)
    whole = hessian.double() + factor.objective.ridge.double().diag()
    left = weight.double()
    for first in range(60, -1, -4):
        columns, rest = slice(first, first + 4), slice(0, first)
        cross = torch.linalg.solve(whole[rest, rest], whole[rest, columns])
        metric = whole[columns, columns] - whole[columns, rest] @ cross
        root = torch.linalg.cholesky(metric).float()
        codes = lattice.nearest_vectors(left[:, columns].float(), parameters, scheme, columns, root)
        chosen = result.codes[:, first // 4 : first // 4 + 1]
        assert (codes == chosen).float().mean() > 0.95  # the rest are near ties
        missed = left[:, columns] - lattice.decode(chosen, parameters, scheme, columns)
        left[:, rest] += missed @ cross.T
    torch.testing.assert_close(result.targets(factor, scheme).double(), left, rtol=0, atol=5e-3)
    error = weight - QuantizedTensor(result.codes, parameters, scheme).decode()
    torch.testing.assert_close(
        result.errors, factor.objective.evaluate_float64(error.double())[1], rtol=1e-3, atol=0
    )


def test_panel_sweep_gain_is_as_reported_and_no_row_loses() -> None:
    scheme, (weight, hessian) = parse("lattice"), _problem()
    factor = factorize(hessian, 0.01, torch.arange(128))
    assert factor is not None
    result = gptq.round_columns(weight, factor, scheme, lattice.fit(weight, scheme))
    state = Refinement(weight, factor.objective, scheme, result.parameters, result.codes)
    gained = state.sweep()
    error = weight - QuantizedTensor(state.codes, state.parameters, scheme).decode()
    after = factor.objective.evaluate_float64(error.double())[1]
    assert bool((gained > 0).all())
    torch.testing.assert_close(result.errors - after, gained, rtol=1e-2, atol=0)
