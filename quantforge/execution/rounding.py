"""Rounding of the matrices that read one shared input, and their way into the files of the format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from quantforge.errors import RefusedError
from quantforge.execution.quantized_inputs import outliers, with_input, without_outliers
from quantforge.execution.journal import Record, merge
from quantforge.execution.row_wise import RowWise, Strips, round_rows
from quantforge.model.statistics import Statistics
from quantforge.numerics.threads import Behind
from quantforge.quantizers import PLAIN, Rounded, rounder_of
from quantforge.quantizers.rtn import judging
from quantforge.settings import Settings, workers_of

if TYPE_CHECKING:
    from quantforge.execution.source_tensors import SourceTensors
    from quantforge.execution.unit_output import UnitOutput
    from quantforge.packers.tensor import QuantizedTensor
    from quantforge.planning.planner import Planned
    from quantforge.plans import TensorPlan


class MatrixRounding:
    """Rounder of a plan's matrices.

    Attributes:
        source: where weights are read.
        output: where the results go.
        importance: mean squares of columns that are known without calibration, by tensor.
        workers: threads that round strips side by side.
    """

    def __init__(
        self,
        planned: Planned,
        source: SourceTensors,
        output: UnitOutput,
        settings: Settings,
        importance: Mapping[str, Tensor],
    ) -> None:
        self.source, self.output, self.importance = source, output, importance
        self._recipe, self._rounder = planned.recipe, planned.plan.rounder
        self._by_name = {tensor.name: tensor for tensor in planned.plan.tensors}
        self.workers = workers_of(settings)

    def known(self, tensor: TensorPlan) -> Statistics:
        """Return what is known of the input of a matrix without calibration, on the device of its weights."""
        squares = self.importance.get(tensor.name)
        if squares is None:
            return Statistics()
        return Statistics(tokens=1, squares=squares.to(self.source.device))

    def shared(
        self, weights: Mapping[str, Tensor], statistics: Statistics, rounder: str | None = None
    ) -> Record:
        """Round the matrices ``[out, in]`` of one shared input, and write them.

        Args:
            weights: by the names of the source.
            statistics: of the input.
            rounder: another one than the plan's.

        Raises:
            RefusedError: the files cannot hold a value, or the input has to be measured and was not observed.
        """
        return self.write(self.rounded(weights, statistics, rounder), weights, statistics)

    def rounded(
        self, weights: Mapping[str, Tensor], statistics: Statistics, rounder: str | None = None
    ) -> dict[str, Rounded]:
        """Round matrices, or the same rows of all of them, and write nothing; arguments as of `shared`."""
        schemes = {
            name: scheme.weight for name in weights if (scheme := self._by_name[name].scheme)
        }
        statistics = without_outliers(statistics, self._by_name[next(iter(weights))])
        method = rounder_of(rounder or self._rounder)
        return method.round_shared(weights, statistics, schemes, self._recipe.rounding)

    def write(
        self, rounded: Mapping[str, Rounded], weights: Mapping[str, Tensor], statistics: Statistics
    ) -> Record:
        """Write the rounded matrices of one shared input, with what is measured of it; arguments as of `shared`."""
        record: Record = {}
        for name, result in rounded.items():
            tensor = self._by_name[name]
            inputs = self._recipe.inputs
            whole = with_input(result.tensor, tensor, weights[name], statistics, inputs)
            self._write(tensor, whole)
            counted, left = outliers(tensor, statistics)
            events = [event.to_json() for event in (*result.events, *left)]
            merge(record, {"events": events, "figures": {name: {**result.figures, **counted}}})
        return record

    def rows(self, tensors: Iterable[TensorPlan], behind: Behind) -> Record:
        """Round matrices to nearest strip by strip; write each, or all ``behind`` where a file does not hold rows."""
        record: Record = {}
        together: dict[str, Strips] = {}
        matrices = (self._row_wise(tensor, behind, together) for tensor in tensors)
        with closing(round_rows(matrices, self.workers)) as done:
            for matrix, found in done:
                merge(record, found)
                if strips := together.pop(matrix.tensor.name, None):
                    behind.do(partial(self._write, matrix.tensor, strips.whole()))
        return record

    def _row_wise(self, tensor: TensorPlan, behind: Behind, together: dict[str, Strips]) -> RowWise:
        """Return how a matrix is rounded in strips; those that are written as one are put ``together`` by name."""
        scheme = tensor.scheme
        assert scheme is not None
        rounding, statistics = self._recipe.rounding, self.known(tensor)

        def rounded(weight: Tensor) -> Rounded:
            weights, schemes = {tensor.name: weight}, {tensor.name: scheme.weight}
            return rounder_of(PLAIN).round_shared(weights, statistics, schemes, rounding)[
                tensor.name
            ]

        def write(first: int, rows: QuantizedTensor) -> None:
            behind.wait()
            (stored,) = tensor.stored
            packed = self.output.storage.pack(tensor, rows)[stored.name]
            self.output.write_rows(stored.name, first, packed)

        def add(first: int, rows: QuantizedTensor) -> None:
            strips = together.setdefault(tensor.name, Strips(tensor.matrix[0]))
            strips.add(first, replace(rows, input=scheme.input))

        read = partial(self.source.weight_rows, tensor)
        importance = judging(statistics, rounding)
        return RowWise(tensor, rounded, read, write if tensor.by_rows else add, importance)

    def _write(self, tensor: TensorPlan, whole: QuantizedTensor) -> None:
        try:
            packed = self.output.storage.pack(tensor, whole)
        except RefusedError as error:  # a value that the files cannot spell
            raise RefusedError(
                f"{tensor.name}: {error.message}", error.hint, tensor=tensor.name
            ) from error
        for stored, value in packed.items():
            self.output.write(stored, value)
