"""SmoothQuant preserves the function, moves outliers, and skips pairs without a gain."""

from __future__ import annotations

import pytest
import torch

from quantforge.grids import ScaleType
from quantforge.model.statistics import Statistics
from quantforge.notation import parse_layer
from quantforge.packers.input_rounding import fake_quantize_input
from quantforge.quantizers import smooth
from quantforge.scheme import LayerScheme
from tests.conftest import Tiny
from tests.thorough import mark_others_thorough
from tests.unit.quantizers.test_awq import (
    FAMILIES,
    ROUNDING,
    first_block,
    in_float64,
    layers_of,
    observed,
    outputs,
    plant,
)

W8A8 = parse_layer("W8A8")
LAYER = LayerScheme(W8A8.weight.with_scale(ScaleType.BF16), W8A8.input)


def smoothed(part, statistics):
    return smooth.apply(part, statistics, layers_of(part, LAYER), ROUNDING)


def error_of_inputs(part):
    """Relative error of every input under one range for a token."""
    errors = {}
    for shared in part.inputs:
        x = torch.cat(
            [
                call.args[0].reshape(-1, call.args[0].shape[-1])
                for call in part.capture_calls(shared.key, 4)
            ]
        )
        errors[shared.key] = float((fake_quantize_input(x, LAYER.input) - x).norm() / x.norm())
    return errors


@pytest.mark.parametrize("family", mark_others_thorough(FAMILIES, "llama", "gemma2", "gpt2"))
def test_smoothing_preserves_the_function_to_float64(tiny: Tiny, family: str) -> None:
    with first_block(tiny(family)) as part:
        plant(part)
        statistics = {
            key: Statistics(result.tokens, peaks=result.peaks.double())
            for key, result in observed(part).items()
        }
        wide = in_float64(part)
        expected = outputs(wide)
        changed, events, figures = smoothed(wide, statistics)
        assert not events
        assert any(entry["strength"] >= 0 for entry in figures.values())
        assert torch.allclose(outputs(wide), expected, rtol=1e-11, atol=1e-11)
        for key, result in observed(wide).items():
            assert torch.allclose(changed[key].peaks, result.peaks, rtol=1e-5)


def test_smoothing_reduces_input_outliers_without_raising_errors(tiny: Tiny) -> None:
    with first_block(tiny("llama")) as part:
        plant(part)
        before = error_of_inputs(part)
        _, _, figures = smoothed(part, observed(part))
        after = error_of_inputs(part)
    for entry in figures.values():
        assert entry["error"] <= 1.0
        assert (entry["strength"] >= 0) is (entry["error"] < 1.0)
    planted = [key for key in figures if before[key] > 1.5 * min(before.values())] or list(figures)
    assert all(figures[key]["error"] < 0.7 for key in planted)
    assert sum(after.values()) < sum(before.values())


def test_pair_without_improvement_keeps_its_bits(tiny: Tiny) -> None:
    with first_block(tiny("llama")) as part:
        weights = {name: part.parameter(name).clone() for name in part.parameters()}
        _, _, figures = smooth.apply(part, observed(part), {}, ROUNDING)
        assert figures == {}
        assert all(torch.equal(part.parameter(name), value) for name, value in weights.items())
