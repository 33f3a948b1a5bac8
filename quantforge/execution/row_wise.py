"""Rounding without statistics, a strip of rows at a time: what a matrix takes does not depend on its size.

Rows are independent of each other when each has parameters of its own, so that rounding them in strips gives the same
codes. Strips end between heads where the rows of a head are reordered on their way into the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from torch import Tensor

from quantforge.events import Event
from quantforge.execution.journal import Record
from quantforge.numerics.threads import in_order
from quantforge.packers.row_codes import strip_of
from quantforge.packers.tensor import QuantizedTensor
from quantforge.planning.peak_memory import RUN_ELEMENTS
from quantforge.plans import TensorPlan
from quantforge.quantizers import Rounded
from quantforge.quantizers.rtn import squares


def row_runs(tensor: TensorPlan) -> Iterator[tuple[int, int]]:
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
        read: rows of the source as float32, given the first and the one behind the last.
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

    strips = ((matrix, run) for matrix in matrices for run in row_runs(matrix.tensor))
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
