"""Inputs rounded at run time, with dynamic and with measured ranges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantforge.errors import RefusedError
from quantforge.execution.rounding import add_input_parameters, count_outliers, decouple_outliers
from quantforge.model.statistics import Statistics
from quantforge.notation import parse_layer
from quantforge.packers.input_rounding import (
    choose_static_scale,
    fake_quantize_input,
    magnitude_histogram,
)
from quantforge.packers.tensor import QuantizedTensor
from quantforge.plans import Action, TensorPlan

WEIGHT = torch.tensor([[0.5, 1.0, -1.0, 2.0], [1.0, 0.1, 0.2, 3.0]])


def activation(text):
    return parse_layer(f"int8:row:sym+{text}").input


def inputs():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 60
    return x


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [("int8:token:dynamic", 0.004, 0.009), ("fp8:token:dynamic", 0.02, 0.03), ("fp8:g128:dynamic", 0.02, 0.03),
     ("mxfp4:g32:dynamic", 0.1, 0.13), ("mxfp8:g32:dynamic", 0.02, 0.04)],
)  # fmt: skip
def test_dynamic_input_rounding_error_is_in_the_expected_range(text, least, most):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    error = (fake_quantize_input(x, activation(text)) - x).norm() / x.norm()
    assert least < error < most


def test_int8_codes_use_the_range_of_each_token():
    x = torch.tensor([[1.0, -2.0, 127.0, 0.4], [0.5, 0.25, -0.1, 0.0]])
    result = fake_quantize_input(x, activation("int8:token:dynamic"))
    assert result[0].tolist() == [1, -2, 127, 0]
    assert result[1] == pytest.approx([0.5, 0.25, -0.1, 0], abs=0.5 / 254)


def test_outlier_column_stays_unrounded_and_others_gain_precision():
    x = inputs()
    plain = fake_quantize_input(x, activation("int8:token:dynamic"))
    mixed = fake_quantize_input(x, activation("int8:token:dynamic:6"))
    assert torch.equal(mixed[:, 7], x[:, 7])
    rest = [column for column in range(256) if column != 7]
    assert (mixed - x)[:, rest].norm() < 0.1 * (plain - x)[:, rest].norm()


def test_observers_choose_the_expected_static_scales():
    x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(1))
    x[0, 0] = 100.0
    counts, peak = magnitude_histogram(x), float(x.abs().max())
    assert int(counts.sum()) == x.numel()
    static = activation("int8:tensor:static")
    scales = {
        name: choose_static_scale(static, counts, peak, name)
        for name in ("absmax", "percentile", "mse")
    }
    assert scales["absmax"] == pytest.approx(100 / 127)
    assert scales["percentile"] < 0.06
    errors = {
        name: float((fake_quantize_input(x, static, torch.tensor([[scale]])) - x).square().sum())
        for name, scale in scales.items()
    }
    assert errors["mse"] <= min(errors.values()) * 1.01


def layer(text):
    scheme = parse_layer(text)
    plan = TensorPlan("m.weight", "F32", (2, 4), Action.QUANTIZE, "", scheme)
    codes = torch.zeros(2, 4, dtype=torch.int8)
    return plan, QuantizedTensor(codes, {"scales": torch.ones(2, 1)}, scheme.weight)


def test_a_static_range_without_an_observation_is_refused():
    plan, tensor = layer("W8A8_STATIC")
    with pytest.raises(RefusedError, match="has to be measured"):
        add_input_parameters(tensor, plan, WEIGHT, Statistics(), "absmax")
    seen = Statistics(
        4, peaks=torch.tensor([1.0, 2.0]), histogram=magnitude_histogram(torch.tensor([1.0, 2.0]))
    )
    result = add_input_parameters(tensor, plan, WEIGHT, seen, "absmax")
    assert result.input == plan.scheme.input
    assert result.parameters["input_scale"].item() == pytest.approx(2 / 127)


def test_columns_beyond_the_threshold_are_reported():
    plan, _ = layer("int8:row:sym+int8:token:dynamic:6")
    seen = Statistics(4, peaks=torch.tensor([1.0, 7.0, 5.9, 80.0]))
    assert count_outliers(plan, seen) == ({"outlier_columns": 2.0}, ())
    assert count_outliers(plan, Statistics()) == ({}, ())


def test_the_columns_with_the_largest_peaks_are_kept_in_16_bits():
    plan, tensor = layer("int8:row:sym+int8:token:dynamic:6:2")
    seen = Statistics(4, peaks=torch.tensor([70.0, 7.0, 5.9, 80.0]))
    result = add_input_parameters(tensor, plan, WEIGHT, seen, "absmax")
    assert result.parameters["outlier_columns"].tolist() == [0, 3]
    assert torch.equal(result.decode(), torch.tensor([[0.5, 0, 0, 2], [1, 0, 0, 3]]))
    figures, events = count_outliers(plan, seen)
    assert figures == {"outlier_columns": 3.0, "unquantized_columns": 2.0}
    assert [event.kind for event in events] == ["outliers-quantized"]
    single_outlier = replace(seen, peaks=torch.tensor([1.0, 1.0, 80.0, 1.0]))
    result = add_input_parameters(tensor, plan, WEIGHT, single_outlier, "absmax")
    assert result.parameters["outlier_columns"].tolist() == [2, -1]
    assert count_outliers(plan, single_outlier)[1] == ()
    with pytest.raises(RefusedError, match="outlier columns"):
        add_input_parameters(tensor, plan, WEIGHT, Statistics(), "absmax")


def test_unquantized_columns_are_decoupled_in_the_hessian():
    plan, _ = layer("int8:row:sym+int8:token:dynamic:6:2")
    hessian = torch.arange(16.0).view(4, 4) + 1
    hessian = hessian @ hessian.T
    seen = Statistics(4, hessian=hessian.clone(), peaks=torch.tensor([1.0, 1.0, 80.0, 1.0]))
    result = decouple_outliers(seen, plan).hessian
    assert result[2].tolist() == result[:, 2].tolist() == [0, 0, float(hessian[2, 2]), 0]
    assert result[0, 1] == hessian[0, 1]
