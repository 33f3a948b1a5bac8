"""Data-free units: copy unquantized tensors and round the rest without statistics, a strip of rows at a time.

If each row has its own parameters, rounding in strips gives the same codes, and memory does not depend on the size of a
matrix. Strips end at head boundaries if the rows of a head are reordered when they are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING

from torch import Tensor

from quantforge.events import Event
from quantforge.execution.journal import Record, merge_records
from quantforge.execution.units import HEAD
from quantforge.model.statistics import Statistics
from quantforge.numerics.threads import BackgroundTask, in_order
from quantforge.packers.row_encoding import strip_of
from quantforge.packers.tensor import QuantizedTensor
from quantforge.planning.peak_memory import STRIP_ELEMENTS, can_round_in_strips
from quantforge.plans import Action, Plan, TensorPlan
from quantforge.progress import report_step
from quantforge.quantizers import RTN, Rounded, is_data_free, load_rounder
from quantforge.quantizers.rtn import error_importance, row_squares

if TYPE_CHECKING:
    from quantforge.execution.rounding import MatrixRounder
    from quantforge.execution.units import Unit


class DataFreeRounder:
    """Rounds and writes units without calibration data, using the matrix rounder ``rounding``.

    The matrices are rounded by the rounder of the plan if it is data-free, and to nearest otherwise.
    """

    def __init__(self, rounding: MatrixRounder) -> None:
        self._rounding = rounding
        planned_rounder = rounding.planned.plan.rounder
        self._rounder = planned_rounder if is_data_free(planned_rounder) else RTN

    def round_unit(self, unit: Unit) -> Record:
        """Copy the unquantized tensors of a unit and round the others; return its record.

        Errors as `execute.execute`.
        """
        if unit.name == HEAD:
            return self._rounding.round_head(unit.tensors, Statistics())
        record: Record = {}
        # Matrices in strips come last, pipelined
        tensors = sorted(unit.tensors, key=_is_rounded_in_strips)
        tensors_with_progress = _report_progress(tensors)
        with BackgroundTask(self._rounding.workers) as background:
            for tensor in islice(
                tensors_with_progress, len(tensors) - sum(map(_is_rounded_in_strips, tensors))
            ):
                if tensor.action is Action.KEEP:
                    background.do(partial(self._rounding.copy, tensor))
                elif tensor.action is Action.QUANTIZE and tensor.name not in record.get(
                    "metrics", {}
                ):
                    background.wait()
                    merge_records(record, self._round_matrix(tensor))
            merge_records(record, self._round_in_strips(tensors_with_progress, background))
        return record

    def _round_matrix(self, tensor: TensorPlan) -> Record:
        """Round and write a matrix together with those that share a parameter with it."""
        group, source = jointly_rounded(tensor, self._rounding.planned.plan), self._rounding.source
        weights = {member.name: source.weight(member) for member in group}
        statistics = self._rounding.importance_statistics(tensor)
        rounded = self._rounding.round(weights, statistics, self._rounder)
        return self._rounding.write(rounded, weights, statistics)

    def _round_in_strips(self, tensors: Iterable[TensorPlan], background: BackgroundTask) -> Record:
        """Round matrices strip by strip; return their record.

        Each strip is written at once, or the assembled matrix if the file does not store rows.
        """
        record: Record = {}
        assemblers: dict[str, StripAssembler] = {}
        matrices = (self._strip_rounding(tensor, background, assemblers) for tensor in tensors)
        with closing(round_in_strips(matrices, self._rounding.workers)) as finished:
            for matrix, matrix_record in finished:
                merge_records(record, matrix_record)
                if strips := assemblers.pop(matrix.tensor.name, None):
                    background.do(
                        partial(self._rounding.pack_and_write, matrix.tensor, strips.assembled())
                    )
        return record

    def _strip_rounding(
        self, tensor: TensorPlan, background: BackgroundTask, assemblers: dict[str, StripAssembler]
    ) -> StripRounding:
        """Return how to round a matrix in strips; ``assemblers`` collects the strips of matrices written as one."""
        scheme = tensor.scheme
        assert scheme is not None
        rounding, statistics = (
            self._rounding.planned.recipe.rounding,
            self._rounding.importance_statistics(tensor),
        )

        def rounded(weight: Tensor) -> Rounded:
            weights, schemes = {tensor.name: weight}, {tensor.name: scheme.weight}
            rounder = load_rounder(self._rounder)
            return rounder.round_matrices(weights, statistics, schemes, rounding)[tensor.name]

        def write(first: int, rows: QuantizedTensor) -> None:
            background.wait()
            (output,) = tensor.outputs
            packed = self._rounding.output.storage.pack(tensor, rows)[output.name]
            self._rounding.output.write_rows(output.name, first, packed)

        def add(first: int, rows: QuantizedTensor) -> None:
            strips = assemblers.setdefault(tensor.name, StripAssembler(tensor.matrix[0]))
            strips.add(first, replace(rows, input=scheme.input))

        read_rows = partial(self._rounding.source.read_weight_rows, tensor)
        importance = error_importance(statistics, rounding)
        return StripRounding(
            tensor, rounded, read_rows, write if tensor.strip_by_strip else add, importance
        )


def _report_progress(tensors: list[TensorPlan]) -> Iterator[TensorPlan]:
    """Yield tensors, reporting each as the current step."""
    for index, tensor in enumerate(tensors):
        report_step(tensor.name, share=index / len(tensors))
        yield tensor


def _is_rounded_in_strips(tensor: TensorPlan) -> bool:
    return tensor.action is Action.QUANTIZE and can_round_in_strips(tensor)


def jointly_rounded(tensor: TensorPlan, plan: Plan) -> list[TensorPlan]:
    """Return the tensors that share a parameter with this one, because engines load them as one matrix."""
    if not (tensor.shared and tensor.scheme and tensor.scheme.weight.is_joint):
        return [tensor]
    same_parameter = [other for other in plan.quantized() if other.shared == tensor.shared]
    return [other for other in same_parameter if other.scheme == tensor.scheme]


def row_strips(tensor: TensorPlan) -> Iterator[tuple[int, int]]:
    """Yield strips of about `STRIP_ELEMENTS` weights as ``(first, last)`` rows."""
    rows, columns = tensor.matrix
    rows_per_head = rows // tensor.heads if tensor.heads else 1
    step = max(1, STRIP_ELEMENTS // (columns * rows_per_head)) * rows_per_head
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


@dataclass(frozen=True, slots=True, eq=False)
class StripRounding:
    """How one matrix is rounded in strips of rows.

    Attributes:
        tensor: plan of the matrix.
        round_strip: rounds rows ``[rows, columns]`` independently of other rows.
        read: reads rows ``first:last`` of the source as float32.
        write: takes the first row and the rounded strip, in order.
        importance: importance of the columns, which weights the error.
    """

    tensor: TensorPlan
    round_strip: Callable[[Tensor], Rounded]
    read: Callable[[int, int], Tensor]
    write: Callable[[int, QuantizedTensor], None]
    importance: Tensor | None = None


def round_in_strips(
    matrices: Iterable[StripRounding], workers: int = 1
) -> Generator[tuple[StripRounding, Record], None, None]:
    """Round and write matrices; yield each with a journal record of its events and relative error.

    ``workers`` threads read and round strips in parallel, and start a matrix before the previous one is finished.
    """

    def rounded(
        strip: tuple[StripRounding, tuple[int, int]],
    ) -> tuple[StripRounding, int, Rounded, float]:
        matrix, (first, last) = strip
        weight = matrix.read(first, last)
        size = math.fsum(row_squares(weight, matrix.importance).tolist())
        with strip_of(math.prod(matrix.tensor.matrix)):
            return matrix, first, matrix.round_strip(weight), size

    strips = ((matrix, rows) for matrix in matrices for rows in row_strips(matrix.tensor))
    with closing(in_order(rounded, strips, workers)) as finished:
        for matrix, matrix_strips in groupby(finished, itemgetter(0)):
            yield matrix, _write_strips(matrix, matrix_strips)


def _write_strips(
    matrix: StripRounding, strips: Iterable[tuple[StripRounding, int, Rounded, float]]
) -> Record:
    """Write the strips of a matrix; return its record."""
    events: dict[str, Event] = {}
    errors, sizes = [], []
    for _, first, rounded, size in strips:
        matrix.write(first, rounded.tensor)
        sizes.append(size)
        errors.append(rounded.figures.get("error", 0.0) * size)
        for event in rounded.events:
            first_event = events.get(event.kind)
            events[event.kind] = event if first_event is None else _add_counts(first_event, event)
    error = math.fsum(errors) / math.fsum(sizes) if any(sizes) else 0.0
    return {
        "events": [event.to_json() for event in events.values()],
        "metrics": {matrix.tensor.name: {"error": error}},
    }


class StripAssembler:
    """Assembles the rounded strips of a matrix with ``rows`` rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._assembled: QuantizedTensor | None = None

    def add(self, first: int, strip: QuantizedTensor) -> None:
        """Add a strip whose first row is ``first``."""
        if self._assembled is None:
            parameters = {name: self._empty(value) for name, value in strip.parameters.items()}
            self._assembled = replace(strip, codes=self._empty(strip.codes), parameters=parameters)
        rows = slice(first, first + len(strip.codes))
        self._assembled.codes[rows] = strip.codes
        for name, value in strip.parameters.items():
            self._assembled.parameters[name][rows] = value

    def assembled(self) -> QuantizedTensor:
        """Return the matrix after all strips were added."""
        assert self._assembled is not None
        return self._assembled

    def _empty(self, strip: Tensor) -> Tensor:
        return strip.new_empty((self._rows, *strip.shape[1:]))


def _add_counts(first: Event, other: Event) -> Event:
    """Merge two events of the same kind by adding the counts at the beginning of their details."""
    count, _, description = first.detail.partition(" ")
    return replace(
        first, detail=f"{int(count) + int(other.detail.partition(' ')[0])} {description}"
    )
