"""Units that look at no data: what is kept is copied, the rest is rounded to nearest, a strip of rows at a time.

Rows are independent of each other when each has parameters of its own, so that rounding them in strips gives the same
codes, and what a matrix takes in memory does not depend on its size. Strips end between heads where the rows of a head
are reordered on their way into the file.
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
from quantforge.execution.journal import Record, merge
from quantforge.execution.progress import tell
from quantforge.execution.units import HEAD
from quantforge.model.statistics import Statistics
from quantforge.numerics.threads import BackgroundTask, in_order
from quantforge.packers.row_encoding import strip_of
from quantforge.packers.tensor import QuantizedTensor
from quantforge.planning.peak_memory import RUN_ELEMENTS, in_strips
from quantforge.plans import Action, Plan, TensorPlan
from quantforge.quantizers import RTN, Rounded, rounder_of
from quantforge.quantizers.rtn import judging, squares

if TYPE_CHECKING:
    from quantforge.execution.rounding import MatrixRounding
    from quantforge.execution.units import Unit


class DataFreeRounder:
    """Rounder of units without calibration; ``rounding`` is what it rounds and writes with."""

    def __init__(self, rounding: MatrixRounding) -> None:
        self._rounding = rounding

    def work(self, unit: Unit) -> Record:
        """Copy what a unit keeps and round the rest to nearest; return its record. Errors as `execute.execute`."""
        if unit.name == HEAD:
            return self._rounding.round_head(unit.tensors, Statistics())
        record: Record = {}
        tensors = sorted(unit.tensors, key=_by_strips)  # matrices in strips are the last, in one go
        reported = _with_progress(tensors)
        with BackgroundTask(self._rounding.workers) as background:
            for tensor in islice(reported, len(tensors) - sum(map(_by_strips, tensors))):
                if tensor.action is Action.KEEP:
                    background.do(partial(self._rounding.copy, tensor))
                elif tensor.action is Action.QUANTIZE and tensor.name not in record.get(
                    "figures", {}
                ):
                    background.wait()
                    merge(record, self._whole(tensor))
            merge(record, self._in_strips(reported, background))
        return record

    def _whole(self, tensor: TensorPlan) -> Record:
        """Round a matrix, and with it those that share a parameter, and write them."""
        group, source = fitted_with(tensor, self._rounding.planned.plan), self._rounding.source
        weights = {one.name: source.weight(one) for one in group}
        statistics = self._rounding.known(tensor)
        rounded = self._rounding.round(weights, statistics, RTN)
        return self._rounding.write(rounded, weights, statistics)

    def _in_strips(self, tensors: Iterable[TensorPlan], background: BackgroundTask) -> Record:
        """Round matrices to nearest strip by strip; write each strip, or the whole where a file does not hold rows."""
        record: Record = {}
        together: dict[str, Strips] = {}
        matrices = (self._row_wise(tensor, background, together) for tensor in tensors)
        with closing(round_rows(matrices, self._rounding.workers)) as done:
            for matrix, found in done:
                merge(record, found)
                if strips := together.pop(matrix.tensor.name, None):
                    background.do(
                        partial(self._rounding.pack_and_write, matrix.tensor, strips.whole())
                    )
        return record

    def _row_wise(
        self, tensor: TensorPlan, background: BackgroundTask, together: dict[str, Strips]
    ) -> RowWise:
        """Return how a matrix is rounded in strips; those that are written as one are put ``together`` by name."""
        scheme = tensor.scheme
        assert scheme is not None
        rounding, statistics = self._rounding.planned.recipe.rounding, self._rounding.known(tensor)

        def rounded(weight: Tensor) -> Rounded:
            weights, schemes = {tensor.name: weight}, {tensor.name: scheme.weight}
            return rounder_of(RTN).round_shared(weights, statistics, schemes, rounding)[tensor.name]

        def write(first: int, rows: QuantizedTensor) -> None:
            background.wait()
            (output,) = tensor.outputs
            packed = self._rounding.output.storage.pack(tensor, rows)[output.name]
            self._rounding.output.write_rows(output.name, first, packed)

        def add(first: int, rows: QuantizedTensor) -> None:
            strips = together.setdefault(tensor.name, Strips(tensor.matrix[0]))
            strips.add(first, replace(rows, input=scheme.input))

        read = partial(self._rounding.source.weight_rows, tensor)
        importance = judging(statistics, rounding)
        return RowWise(tensor, rounded, read, write if tensor.by_rows else add, importance)


def _with_progress(tensors: list[TensorPlan]) -> Iterator[TensorPlan]:
    """Yield tensors, and tell where the work is."""
    for index, tensor in enumerate(tensors):
        tell(tensor.name, share=index / len(tensors))
        yield tensor


def _by_strips(tensor: TensorPlan) -> bool:
    return tensor.action is Action.QUANTIZE and in_strips(tensor)


def fitted_with(tensor: TensorPlan, plan: Plan) -> list[TensorPlan]:
    """Return the tensors that share a parameter with this one: engines load them as one matrix."""
    if not (tensor.shared and tensor.scheme and tensor.scheme.weight.joint):
        return [tensor]
    alike = [other for other in plan.quantized() if other.shared == tensor.shared]
    return [other for other in alike if other.scheme == tensor.scheme]


def row_strips(tensor: TensorPlan) -> Iterator[tuple[int, int]]:
    """Yield strips of about `RUN_ELEMENTS` weights as ``(first, last)`` rows."""
    rows, columns = tensor.matrix
    head = rows // tensor.heads if tensor.heads else 1
    step = max(1, RUN_ELEMENTS // (columns * head)) * head
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


@dataclass(frozen=True, slots=True, eq=False)
class RowWise:
    """A matrix that is rounded in strips.

    Attributes:
        tensor: what is planned.
        rounded: rounds rows ``[rows, columns]`` without looking at others.
        read: rows of the source as float32, given the first and the one after the last.
        write: takes the first row and the rounded strip, in order.
        importance: of the columns, by which the error is weighed.
    """

    tensor: TensorPlan
    rounded: Callable[[Tensor], Rounded]
    read: Callable[[int, int], Tensor]
    write: Callable[[int, QuantizedTensor], None]
    importance: Tensor | None = None


def round_rows(
    matrices: Iterable[RowWise], workers: int = 1
) -> Generator[tuple[RowWise, Record], None, None]:
    """Round matrices and write them; yield each with its events and its relative error as a record of the journal.

    ``workers`` threads read and round strips side by side, and begin a matrix while the one before it ends.
    """

    def rounded(strip: tuple[RowWise, tuple[int, int]]) -> tuple[RowWise, int, Rounded, float]:
        matrix, (first, last) = strip
        weight = matrix.read(first, last)
        size = math.fsum(squares(weight, matrix.importance).tolist())
        with strip_of(math.prod(matrix.tensor.matrix)):
            return matrix, first, matrix.rounded(weight), size

    strips = ((matrix, rows) for matrix in matrices for rows in row_strips(matrix.tensor))
    with closing(in_order(rounded, strips, workers)) as done:
        for matrix, parts in groupby(done, itemgetter(0)):
            yield matrix, _written(matrix, parts)


def _written(matrix: RowWise, parts: Iterable[tuple[RowWise, int, Rounded, float]]) -> Record:
    """Write the strips of a matrix; return its record."""
    events: dict[str, Event] = {}
    errors, sizes = [], []
    for _, first, rounded, size in parts:
        matrix.write(first, rounded.tensor)
        sizes.append(size)
        errors.append(rounded.figures.get("error", 0.0) * size)
        for event in rounded.events:
            known = events.get(event.kind)
            events[event.kind] = event if known is None else _added(known, event)
    error = math.fsum(errors) / math.fsum(sizes) if any(sizes) else 0.0
    return {
        "events": [event.to_json() for event in events.values()],
        "figures": {matrix.tensor.name: {"error": error}},
    }


class Strips:
    """Rounded strips of a matrix of so many ``rows``, put together."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._whole: QuantizedTensor | None = None

    def add(self, first: int, strip: QuantizedTensor) -> None:
        """Take a strip whose first row is ``first``."""
        if self._whole is None:
            found = {name: self._empty(value) for name, value in strip.parameters.items()}
            self._whole = replace(strip, codes=self._empty(strip.codes), parameters=found)
        place = slice(first, first + len(strip.codes))
        self._whole.codes[place] = strip.codes
        for name, value in strip.parameters.items():
            self._whole.parameters[name][place] = value

    def whole(self) -> QuantizedTensor:
        """Return the matrix, once all its strips were taken."""
        assert self._whole is not None
        return self._whole

    def _empty(self, strip: Tensor) -> Tensor:
        return strip.new_empty((self._rows, *strip.shape[1:]))


def _added(one: Event, other: Event) -> Event:
    """Join what two strips lose: each says how many of one thing."""
    count, _, what = one.detail.partition(" ")
    return replace(one, detail=f"{int(count) + int(other.detail.partition(' ')[0])} {what}")
