"""Quantized inputs in a run: the range that a matrix takes, the columns that are kept.

A dynamic input needs nothing to be observed. A static one needs a histogram of its magnitudes; LLM.int8()'s threshold
the largest magnitude of each column, to report how many columns it concerns and to keep the largest of them in 16 bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantforge.errors import RefusedError
from quantforge.events import Event
from quantforge.model.statistics import Statistics
from quantforge.packers.input_rounding import static_scale
from quantforge.packers.tensor import QuantizedTensor
from quantforge.plans import TensorPlan
from quantforge.scheme import Activation


def with_input(
    tensor: QuantizedTensor,
    plan: TensorPlan,
    weight: Tensor,
    statistics: Statistics,
    observer: str,
) -> QuantizedTensor:
    """Return a rounded matrix that says how its input is quantized.

    With it goes what calibration found: the range of a static input, as ``observer`` chooses it (see `static_scale`),
    and LLM.int8()'s columns of ``weight``, the matrix before rounding.

    Raises:
        RefusedError: a static range, or columns to keep, without any observation.
    """
    activation = plan.scheme.input if plan.scheme else None
    if activation is None or not activation.measured:
        return replace(tensor, input=activation)
    if statistics.peaks is None or (statistics.histogram is None and not activation.dynamic):
        what = "a static range" if not activation.dynamic else "outlier columns"
        raise RefusedError(
            f"{plan.name}: {what} of its input ({activation}) has to be measured",
            "give a text to calibrate on, or take dynamic inputs: int8:row:sym+int8:token:dynamic",
            tensor=plan.name,
        )
    if activation.dynamic:
        found = _kept(weight, outlier_columns(activation, statistics.peaks), activation.kept)
    else:
        assert statistics.histogram is not None
        peak = float(statistics.peaks.max())
        scale = static_scale(activation, statistics.histogram, peak, observer)
        found = {"input_scale": torch.tensor([[scale]], dtype=torch.float32)}
    return replace(tensor, parameters={**tensor.parameters, **found}, input=activation)


def outlier_columns(activation: Activation, peaks: Tensor) -> Tensor:
    """Return the ascending columns that are kept in 16 bits: those with the largest peaks beyond the threshold."""
    order = peaks.argsort(descending=True, stable=True)[: activation.kept]
    return order[peaks[order] > (activation.threshold or 0.0)].sort().values


def _kept(weight: Tensor, columns: Tensor, most: int) -> dict[str, Tensor]:
    slots = min(most, weight.shape[1])
    padded = torch.nn.functional.pad(columns, (0, slots - len(columns)), value=-1)
    values = weight.new_zeros(len(weight), slots)
    values[:, : len(columns)] = weight[:, columns]
    limit = torch.finfo(torch.float16).max
    return {
        "outlier_columns": padded.int(),
        "outlier_weight": values.clamp(-limit, limit).half(),
    }


def without_outliers(statistics: Statistics, plan: TensorPlan) -> Statistics:
    """Uncouple columns that stay in 16 bits from the rest of the Hessian, in place: they leave no error to others."""
    activation = plan.scheme.input if plan.scheme else None
    hessian, peaks = statistics.hessian, statistics.peaks
    if activation is None or not activation.kept or hessian is None or peaks is None:
        return statistics
    columns = outlier_columns(activation, peaks)
    diagonal = hessian.diagonal()[columns].clone()
    hessian[columns] = 0
    hessian[:, columns] = 0
    hessian[columns, columns] = diagonal
    return statistics


def outliers(
    plan: TensorPlan, statistics: Statistics
) -> tuple[dict[str, float], tuple[Event, ...]]:
    """Return how many columns pass the threshold of a layer, and an event if that is more than are kept."""
    activation = plan.scheme.input if plan.scheme else None
    if activation is None or activation.threshold is None or statistics.peaks is None:
        return {}, ()
    count = int((statistics.peaks > activation.threshold).sum())
    figures = {"outlier_columns": float(count)}
    if not activation.kept:
        return figures, ()
    figures["kept_columns"] = float(min(count, activation.kept))
    if count <= activation.kept:
        return figures, ()
    detail = f"{count} columns pass {activation.threshold:g}, {activation.kept} are kept in 16 bits"
    return figures, (Event("outliers-left", plan.name, detail),)
