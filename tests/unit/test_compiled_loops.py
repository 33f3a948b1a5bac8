"""The loops for large matrices give what the torch code for small ones gives."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.packers import integer, rows
from quantforge.products import reproducible
from quantforge.quantizers import Statistics, gptq, strips
from quantforge.recipe import GptqOptions, Recipe
from quantforge.scheme import parse

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
def test_the_scale_search_finds_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, importance, scheme = _awkward(70, 256), _matrix(256, seed=1).square(), parse(text)
    plain = integer.fit(weight, scheme, importance, search=True)
    monkeypatch.setattr(rows, "LEAST", 1)
    compiled = integer.fit(weight, scheme, importance, search=True)
    assert {key: (value.dtype, value.shape) for key, value in compiled.items()} == {
        key: (value.dtype, value.shape) for key, value in plain.items()
    }
    same = torch.isclose(compiled["scales"].float(), plain["scales"].float(), rtol=1e-5, atol=0)
    assert same.float().mean() > 0.97  # the rest are near ties
    errors = [
        (weight - integer.decode(integer.encode(weight, found, scheme), found, scheme)).square()
        @ importance
        for found in (plain, compiled)
    ]
    torch.testing.assert_close(errors[1], errors[0], rtol=2e-3, atol=1e-12)


@pytest.mark.parametrize("text", SCHEMES)
def test_gptq_and_its_sweeps_choose_the_same_codes(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, inputs = _awkward(300, 128), _matrix(400, 128, seed=2) * torch.linspace(0.2, 3, 128)
    hessian, scheme = inputs.T @ inputs / 400, parse(text)
    recipe = Recipe(scales="absmax", gptq=GptqOptions(refine=2))
    found = []
    for least in (strips.COMPILED_FROM, 1):
        monkeypatch.setattr(strips, "COMPILED_FROM", least)
        statistics = Statistics(hessian=hessian)
        found.append(gptq.round_shared({"w": weight}, statistics, {"w": scheme}, recipe)["w"])
    plain, compiled = found
    assert (compiled.tensor.codes == plain.tensor.codes).float().mean() > 0.995
    assert compiled.figures["error"] == pytest.approx(plain.figures["error"], rel=1e-3)


def test_parts_of_a_matrix_are_the_same_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, inputs = _matrix(150, 128), _matrix(400, 128, seed=2) * torch.linspace(0.2, 3, 128)
    statistics = Statistics(hessian=inputs.T @ inputs / 400)
    monkeypatch.setattr(gptq, "ROWS", 40)
    found, before = [], torch.get_num_threads()
    together, solve = threading.Barrier(2, timeout=60), gptq._solve

    def solved(*args: Any) -> Any:
        if gptq.COMPILED_FROM == 1:
            together.wait()  # two at a time, or never
        return solve(*args)

    monkeypatch.setattr(gptq, "_solve", solved)
    try:
        for least, threads in ((1 << 30, 1), (1, 2), (1, 4)):
            monkeypatch.setattr(gptq, "COMPILED_FROM", least)
            torch.set_num_threads(threads)
            with torch.inference_mode(), reproducible():
                rounded = gptq.round_shared(
                    {"w": weight}, statistics, {"w": parse("int3:g32:asym")}, Recipe()
                )
            assert torch.get_num_threads() == threads
            found.append(rounded["w"].tensor)
    finally:
        torch.set_num_threads(before)
    for tensor in found[1:]:
        assert torch.equal(tensor.codes, found[0].codes)
        for key, value in tensor.parameters.items():
            assert torch.equal(value, found[0].parameters[key])
