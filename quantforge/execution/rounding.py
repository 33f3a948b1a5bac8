"""Read, round and write the matrices that share an input, with measured parameters of quantized inputs.

For a quantized input, its range or its outlier columns are stored with the matrices. A dynamic input needs no
observation. A static one needs a histogram of its magnitudes. The threshold of LLM.int8() needs the largest magnitude
of each column, to report the number of outlier columns and to keep the largest ones in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.errors import RefusedError
from quantforge.events import Event
from quantforge.execution.journal import Record, merge_records
from quantforge.files.finite_values import check_finite
from quantforge.model.statistics import Statistics
from quantforge.packers.input_rounding import choose_static_scale
from quantforge.quantizers import Rounded, load_rounder
from quantforge.settings import rounding_workers

if TYPE_CHECKING:
    from quantforge.architectures.match import ModelLayout
    from quantforge.execution.run_inputs import RunInputs
    from quantforge.execution.unit_output import UnitOutput
    from quantforge.files.reader import Checkpoint
    from quantforge.packers.tensor import QuantizedTensor
    from quantforge.plans import TensorPlan
    from quantforge.scheme import Activation


class MatrixRounder:
    """Reads, rounds and writes the matrices of a plan.

    Attributes:
        planned: the plan and its recipe.
        source: reader of the source's weights.
        output: writer of the results.
        importance: mean squares of input columns known without calibration, by tensor.
        workers: number of threads that round strips in parallel.
    """

    def __init__(self, inputs: RunInputs, output: UnitOutput) -> None:
        planned, settings = inputs.planned, inputs.settings
        self.planned, self.output, self.importance = planned, output, inputs.importance
        self.source = SourceTensors(inputs.checkpoint, planned.model_layout, settings.device)
        self.workers = rounding_workers(settings)
        self._recipe, self._rounder = planned.recipe, planned.plan.rounder
        self._by_name = {tensor.name: tensor for tensor in planned.plan.tensors}

    def importance_statistics(self, tensor: TensorPlan) -> Statistics:
        """Return the importance of a matrix's input as statistics, on the device of its weights; empty if unknown."""
        squares = self.importance.get(tensor.name)
        if squares is None:
            return Statistics()
        return Statistics(tokens=1, squares=squares.to(self.source.device))

    def round(
        self, weights: Mapping[str, Tensor], statistics: Statistics, rounder: str | None = None
    ) -> dict[str, Rounded]:
        """Round the matrices ``[out, in]`` of one shared input, or the same rows of each, without writing them.

        Args:
            weights: matrices by source tensor name.
            statistics: statistics of the input.
            rounder: name of the rounder; default: that of the plan.
        """
        schemes = {
            name: scheme.weight for name in weights if (scheme := self._by_name[name].scheme)
        }
        statistics = decouple_outliers(statistics, self._by_name[next(iter(weights))])
        method = load_rounder(rounder or self._rounder)
        return method.round_matrices(weights, statistics, schemes, self._recipe.rounding)

    def write(
        self, rounded: Mapping[str, Rounded], weights: Mapping[str, Tensor], statistics: Statistics
    ) -> Record:
        """Write the rounded matrices of one shared input, with its measured parameters; return their record.

        Args:
            rounded: rounded matrices by source tensor name.
            weights: the matrices before rounding.
            statistics: statistics of the input.

        Raises:
            RefusedError: the files cannot hold a value, or the input needs a measurement but was not observed.
        """
        record: Record = {}
        for name, result in rounded.items():
            tensor = self._by_name[name]
            inputs = self._recipe.activation_range
            quantized = add_input_parameters(
                result.tensor, tensor, weights[name], statistics, inputs
            )
            self.pack_and_write(tensor, quantized)
            outlier_metrics, outlier_events = count_outliers(tensor, statistics)
            events = [event.to_json() for event in (*result.events, *outlier_events)]
            merge_records(
                record, {"events": events, "metrics": {name: {**result.figures, **outlier_metrics}}}
            )
        return record

    def round_head(self, tensors: Sequence[TensorPlan], statistics: Statistics) -> Record:
        """Read, round and write a quantized head; return its record.

        Args:
            tensors: plans of the head's tensors; if empty, the record is empty.
            statistics: statistics of the output of the final norm; importance from a file takes precedence.

        Raises:
            As `write`.
        """
        weights = {tensor.name: self.source.weight(tensor) for tensor in tensors}
        for tensor in tensors:
            if tensor.name in self.importance:
                statistics = self.importance_statistics(tensor)
        if not weights:
            return {}
        return self.write(self.round(weights, statistics), weights, statistics)

    def copy(self, tensor: TensorPlan) -> None:
        """Copy a tensor from the source to the output."""
        if not tensor.outputs[0].shape or self.output.storage.needs_whole_tensor(tensor):
            self.output.write_unquantized(tensor, self.source.whole(tensor))
        else:
            self.output.write_unquantized_rows(tensor, partial(self.source.rows, tensor))

    def pack_and_write(self, tensor: TensorPlan, quantized: QuantizedTensor) -> None:
        """Pack a rounded matrix as the format stores it, and write it.

        Raises:
            RefusedError: the files cannot hold a value.
        """
        try:
            packed = self.output.storage.pack(tensor, quantized)
        except RefusedError as error:  # the format cannot represent a value
            raise RefusedError(
                f"{tensor.name}: {error.message}", error.hint, tensor=tensor.name
            ) from error
        for stored, value in packed.items():
            self.output.write(stored, value)


class SourceTensors:
    """Reader of the tensors of a checkpoint; each method raises `InputError` for a value that is not finite.

    Attributes:
        device: device on which weights are placed.
    """

    def __init__(self, checkpoint: Checkpoint, model_layout: ModelLayout, device: str) -> None:
        self._checkpoint, self._model_layout = checkpoint, model_layout
        self.device = device

    def whole(self, tensor: TensorPlan) -> Tensor:
        """Read a tensor as it is stored."""
        name = self._name_of(tensor)
        value = self._checkpoint.read(name)
        check_finite(name, value)
        return value

    def rows(self, tensor: TensorPlan, first: int, last: int) -> Tensor:
        """Read rows ``first:last`` of a tensor as they are stored."""
        name = self._name_of(tensor)
        value = self._checkpoint.read_rows(name, first, last)
        check_finite(name, value, first=first, rows=tensor.shape[0])
        return value

    def weight(self, tensor: TensorPlan) -> Tensor:
        """Read a weight as float32 ``[out_features, in_features]``."""
        weight = self.whole(tensor).to(self.device, torch.float32)
        return weight.T.contiguous() if tensor.transposed else weight

    def read_weight_rows(self, tensor: TensorPlan, first: int, last: int) -> Tensor:
        """Read rows of a weight that is not transposed, as float32."""
        return self.rows(tensor, first, last).to(self.device, torch.float32)

    def _name_of(self, tensor: TensorPlan) -> str:
        """Return the name under which the source stores a tensor; a head being untied is read from the embedding."""
        if tensor.name in self._checkpoint.entries:
            return tensor.name
        architecture = self._model_layout.architecture
        assert architecture is not None  # only declared models have tied heads to untie
        return self._model_layout.by_name[f"{architecture.embedding}.weight"].header.name


def add_input_parameters(
    tensor: QuantizedTensor,
    plan: TensorPlan,
    weight: Tensor,
    statistics: Statistics,
    observer: str,
) -> QuantizedTensor:
    """Return a rounded matrix with the scheme and measured parameters of its quantized input.

    The parameters are the range of a static input, chosen by ``observer`` (see `choose_static_scale`), or the outlier
    columns of LLM.int8(), copied from ``weight``, the matrix before rounding.

    Raises:
        RefusedError: a static range or outlier columns are needed, but the input was not observed.
    """
    activation = plan.scheme.input if plan.scheme else None
    if activation is None or not activation.needs_calibration:
        return replace(tensor, input=activation)
    if statistics.peaks is None or (statistics.histogram is None and not activation.dynamic):
        description = "a static range" if not activation.dynamic else "outlier columns"
        raise RefusedError(
            f"{plan.name}: {description} of its input ({activation}) has to be measured",
            "give a text to calibrate on, or take dynamic inputs: int8:row:sym+int8:token:dynamic",
            tensor=plan.name,
        )
    if activation.dynamic:
        input_parameters = _outlier_parameters(
            weight, outlier_columns(activation, statistics.peaks), activation.max_outlier_columns
        )
    else:
        assert statistics.histogram is not None
        peak = float(statistics.peaks.max())
        scale = choose_static_scale(activation, statistics.histogram, peak, observer)
        input_parameters = {"input_scale": torch.tensor([[scale]], dtype=torch.float32)}
    return replace(tensor, parameters={**tensor.parameters, **input_parameters}, input=activation)


def outlier_columns(activation: Activation, peaks: Tensor) -> Tensor:
    """Return the ascending columns that are kept in 16 bits: those with the largest peaks above the threshold."""
    order = peaks.argsort(descending=True, stable=True)[: activation.max_outlier_columns]
    return order[peaks[order] > (activation.threshold or 0.0)].sort().values


def _outlier_parameters(weight: Tensor, columns: Tensor, max_columns: int) -> dict[str, Tensor]:
    slots = min(max_columns, weight.shape[1])
    padded = torch.nn.functional.pad(columns, (0, slots - len(columns)), value=-1)
    values = weight.new_zeros(len(weight), slots)
    values[:, : len(columns)] = weight[:, columns]
    limit = torch.finfo(torch.float16).max
    return {
        "outlier_columns": padded.int(),
        "outlier_weight": values.clamp(-limit, limit).half(),
    }


def decouple_outliers(statistics: Statistics, plan: TensorPlan) -> Statistics:
    """Decouple columns kept in 16 bits from the rest of the Hessian, in place: they have no error to compensate."""
    activation = plan.scheme.input if plan.scheme else None
    hessian, peaks = statistics.hessian, statistics.peaks
    if activation is None or not activation.max_outlier_columns or hessian is None or peaks is None:
        return statistics
    columns = outlier_columns(activation, peaks)
    diagonal = hessian.diagonal()[columns].clone()
    hessian[columns] = 0
    hessian[:, columns] = 0
    hessian[columns, columns] = diagonal
    return statistics


def count_outliers(
    plan: TensorPlan, statistics: Statistics
) -> tuple[dict[str, float], tuple[Event, ...]]:
    """Return the number of outlier columns of a layer, and an event if it exceeds the number that can be kept."""
    activation = plan.scheme.input if plan.scheme else None
    if activation is None or activation.threshold is None or statistics.peaks is None:
        return {}, ()
    count = int((statistics.peaks > activation.threshold).sum())
    metrics = {"outlier_columns": float(count)}
    if not activation.max_outlier_columns:
        return metrics, ()
    metrics["unquantized_columns"] = float(min(count, activation.max_outlier_columns))
    if count <= activation.max_outlier_columns:
        return metrics, ()
    detail = f"{count} columns pass {activation.threshold:g}, {activation.max_outlier_columns} are kept in 16 bits"
    return metrics, (Event("outliers-quantized", plan.name, detail),)
