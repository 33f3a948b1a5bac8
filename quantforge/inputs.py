"""Quantized inputs in a run: what to observe of them, the range that a matrix takes, who is rounded together.

A dynamic input needs nothing to be observed. A static one needs a histogram of its magnitudes; LLM.int8()'s threshold
the largest magnitude of each column, to report how many columns it concerns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from quantforge.errors import RefusedError
from quantforge.packers.inputs import static_scale
from quantforge.planned import Plan, TensorPlan
from quantforge.quantizers import Statistics, of_inputs
from quantforge.recipe import Recipe
from quantforge.scheme import Activation
from quantforge.tensor import QuantizedTensor


def observed_again(inputs: Iterable[Activation | None], transforms: Sequence[str]) -> bool:
    """Whether transforms change what was observed of the inputs."""
    return bool(transforms) and bool(of_inputs(inputs))


def joined(first: Statistics, second: Statistics | None) -> Statistics:
    """Return the first statistics with the ranges of the second."""
    if second is None:
        return first
    return replace(first, peaks=second.peaks, histogram=second.histogram)


def with_input(
    tensor: QuantizedTensor, plan: TensorPlan, statistics: Statistics, recipe: Recipe
) -> QuantizedTensor:
    """Return a rounded matrix that says how its input is quantized, with the range of a static one.

    Raises:
        RefusedError: a static range without any observation.
    """
    activation = plan.scheme.input if plan.scheme else None
    if activation is None:
        return tensor
    if activation.dynamic:
        return replace(tensor, input=activation)
    if statistics.histogram is None or statistics.peaks is None:
        raise RefusedError(
            f"{plan.name}: a static range of its input ({activation}) has to be measured",
            "give a text to calibrate on, or take dynamic inputs: int8:row:sym+int8:token:dynamic",
            tensor=plan.name,
        )
    peak = float(statistics.peaks.max())
    scale = static_scale(activation, statistics.histogram, peak, recipe.inputs)
    parameters = {**tensor.parameters, "input_scale": torch.tensor([[scale]], dtype=torch.float32)}
    return replace(tensor, parameters=parameters, input=activation)


def outliers(plan: TensorPlan, statistics: Statistics) -> dict[str, float]:
    """Return how many columns pass the threshold of a layer, as a figure; nothing where there is none."""
    activation = plan.scheme.input if plan.scheme else None
    if activation is None or activation.threshold is None or statistics.peaks is None:
        return {}
    return {"outlier_columns": float((statistics.peaks > activation.threshold).sum())}


def fitted_with(tensor: TensorPlan, plan: Plan) -> list[TensorPlan]:
    """Return the tensors that share a parameter with this one: engines load them as one matrix."""
    if not (tensor.shared and tensor.scheme and tensor.scheme.weight.joint):
        return [tensor]
    alike = [other for other in plan.quantized() if other.shared == tensor.shared]
    return [other for other in alike if other.scheme == tensor.scheme]
