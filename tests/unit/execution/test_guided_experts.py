"""Guided Hessians of single experts come from the tokens that are routed to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge import plan
from quantforge.execution import guide
from quantforge.model import expert_statistics
from quantforge.model.statistics import Statistics
from quantforge.quantizers.gptq import gptq
from quantforge.quantizers.guidance.gradients import OutputGradients
from quantforge.quantizers.guidance.token_weights import TokenWeights
from quantforge.verification.verify import verify
from tests.conftest import Tiny
from tests.runs import CALIBRATION, StopError, crash_after, fast_recipe, file_digests, quantize

ROWS = replace(CALIBRATION, samples=12, length=32)


def test_expert_strips_use_hessians_of_their_own_tokens(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients: dict[str, list[OutputGradients]] = {}
    strips: dict[str, list[Tensor]] = {}
    write, shared = TokenWeights.__call__, gptq.round_matrices

    def writing(weights: TokenWeights, one: OutputGradients) -> None:
        gradients.setdefault(one.name, []).append(one)
        write(weights, one)

    def rounding(weights: Any, statistics: Statistics, *rest: Any) -> Any:
        assert statistics.hessian is not None
        for name in weights:
            strips.setdefault(name.removesuffix(".weight"), []).append(statistics.hessian.clone())
        return shared(weights, statistics, *rest)

    monkeypatch.setattr(TokenWeights, "__call__", writing)
    monkeypatch.setattr(gptq, "round_matrices", rounding)
    for name in ("PRIOR_WEIGHT", "OFF_DIAGONAL_SHRINKAGE"):  # a prior that counts nothing
        monkeypatch.setattr(expert_statistics, name, 1e-9)
    recipe = fast_recipe("gptq", bits=4, guided_hessians=2, calibration=ROWS)
    quantize(tiny("qwen3-moe"), tmp_path / "out", recipe)
    compared = 0
    for name, hessians in strips.items():
        seen = gradients[name]
        if ".experts." not in name or sum(len(part.inputs) for part in seen) < 4:
            continue
        inputs = torch.cat([part.inputs for part in seen]).double()
        rows = torch.cat([part.gradients for part in seen]).double().tensor_split(2, -1)
        for result, own in zip(hessians, rows, strict=True):
            weights = own.square().mean(1)
            expected = (inputs * weights[:, None]).T @ inputs / weights.sum()
            assert float((result - expected).norm() / expected.norm()) < 1e-4, name
            compared += 1
    assert compared > 10


@pytest.mark.thorough
def test_threads_and_resume_give_the_same_bytes(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("gpt-oss")
    recipe = fast_recipe(
        "gptq", bits=4, guided_hessians=2, scales="absmax", calibration=CALIBRATION
    )
    quantize(model, tmp_path / "whole", recipe, threads=1)
    out, settings = tmp_path / "out", {"threads": 3, "activations": "disk"}
    with pytest.raises(StopError):
        quantize(model, out, recipe, progress=crash_after("block 0 expert 1"), **settings)
    assert quantize(model, out, recipe, **settings).resumed
    assert file_digests(out) == file_digests(tmp_path / "whole")
    report = verify(out, model)
    assert not [item for item in report.findings if item.level == "error"]


def test_token_weights_file_grows_as_planned(tiny: Tiny, tmp_path: Path) -> None:
    sizes, forecasts = [], []
    for strips in (1, 3):
        recipe = fast_recipe("gptq", bits=4, guided_hessians=strips, calibration=ROWS)
        out = tmp_path / str(strips)
        with pytest.raises(StopError):
            quantize(tiny("qwen3-moe"), out, recipe, progress=crash_after("token weights"))
        sizes.append(
            (tmp_path / f".{out.name}.qf" / "journal" / guide.TOKEN_WEIGHTS_FILE).stat().st_size
        )
        work = plan(tiny("qwen3-moe"), recipe).work
        assert work is not None
        forecasts.append(work.guide_bytes)
    assert sizes[1] - sizes[0] == forecasts[1] - forecasts[0]
    assert sizes[0] < forecasts[0]
