"""Compiled loops for large and small matrices equal those in torch."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.model.statistics import Statistics
from quantforge.notation import parse
from quantforge.numerics.threads import reproducible
from quantforge.packers import integer
from quantforge.packers import row_encoding as rows
from quantforge.quantizers import Rounded
from quantforge.quantizers.gptq import column_loops, gptq
from quantforge.recipe import GptqOptions, Rounding
from tests.thorough import mark_others_thorough

SCHEMES = ["int4:g64:sym:f16", "int3:g32:asym:bf16", "int2:g64:sym:f32", "int8:row:asym:f16"]


def _matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _awkward(rows: int, columns: int) -> Tensor:
    weight = 0.02 * _matrix(rows, columns)
    weight[0] = 0
    weight[1] = weight[1, 0]
    weight[2, ::7] *= 100
    weight[3] = weight[3].abs()
    weight[4] *= 2e-6  # its float16 scales are subnormal
    return weight


@pytest.mark.parametrize("text", SCHEMES)
def test_compiled_scale_search_equals_torch(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, importance, scheme = _awkward(70, 256), _matrix(256, seed=1).square(), parse(text)
    plain = integer.fit(weight, scheme, importance, search=True)
    monkeypatch.setattr(rows, "COMPILED_FROM", 1)
    compiled = integer.fit(weight, scheme, importance, search=True)
    assert {key: (value.dtype, value.shape) for key, value in compiled.items()} == {
        key: (value.dtype, value.shape) for key, value in plain.items()
    }
    same = torch.isclose(compiled["scales"].float(), plain["scales"].float(), rtol=1e-5, atol=0)
    assert same.float().mean() > 0.97  # the rest are near ties
    errors = [
        (weight - integer.decode(integer.encode(weight, result, scheme), result, scheme)).square()
        @ importance
        for result in (plain, compiled)
    ]
    torch.testing.assert_close(errors[1], errors[0], rtol=2e-3, atol=1e-12)


@pytest.mark.parametrize(
    "text",
    mark_others_thorough([*SCHEMES, "q4_k", "q8_0", "iq4_xs"], *SCHEMES[:2], "q4_k", "iq4_xs"),
)
def test_compiled_gptq_and_sweeps_choose_the_same_codes(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, inputs = _awkward(300, 256), _matrix(400, 256, seed=2) * torch.linspace(0.2, 3, 256)
    hessian, scheme = inputs.T @ inputs / 400, parse(text)
    rounding = Rounding(scales="absmax", gptq=GptqOptions(refine=2))

    def rounded() -> Rounded:
        return gptq.round_matrices(
            {"w": weight}, Statistics(hessian=hessian), {"w": scheme}, rounding
        )["w"]

    with monkeypatch.context() as patch:
        patch.setattr(column_loops, "loops_for", lambda *_: None)
        in_torch = rounded()
    arrays = rounded()
    monkeypatch.setattr(column_loops, "COMPILED_FROM", 1)
    compiled = rounded()
    assert torch.equal(compiled.tensor.codes, arrays.tensor.codes)
    for key, value in compiled.tensor.parameters.items():
        assert torch.equal(value, arrays.tensor.parameters[key])
    assert compiled.figures == arrays.figures
    # Sums in another order: a near tie that falls otherwise leads its row elsewhere.
    rows = (arrays.tensor.codes == in_torch.tensor.codes).all(1).float().mean()
    assert rows > 0.8
    assert arrays.figures["error"] == pytest.approx(in_torch.figures["error"], rel=1e-3)


def test_parallel_parts_equal_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, inputs = _matrix(150, 128), _matrix(400, 128, seed=2) * torch.linspace(0.2, 3, 128)
    statistics = Statistics(hessian=inputs.T @ inputs / 400)
    monkeypatch.setattr(gptq, "ROWS_PER_PART", 40)
    results, before = [], torch.get_num_threads()
    together, solve = threading.Barrier(2, timeout=240), gptq._round_rows

    def solved(*args: Any) -> Any:
        if gptq.COMPILED_FROM == 1:
            together.wait()  # two at a time, or never
        return solve(*args)

    monkeypatch.setattr(gptq, "_round_rows", solved)
    try:
        for least, threads in ((1 << 30, 1), (1, 2), (1, 4)):
            monkeypatch.setattr(gptq, "COMPILED_FROM", least)
            torch.set_num_threads(threads)
            with torch.inference_mode(), reproducible():
                rounded = gptq.round_matrices(
                    {"w": weight}, statistics, {"w": parse("int3:g32:asym")}, Rounding()
                )
            assert torch.get_num_threads() == threads
            results.append(rounded["w"].tensor)
    finally:
        torch.set_num_threads(before)
    for tensor in results[1:]:
        assert torch.equal(tensor.codes, results[0].codes)
        for key, value in tensor.parameters.items():
            assert torch.equal(value, results[0].parameters[key])
