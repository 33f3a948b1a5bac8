"""Rounding without statistics, a run of rows at a time: what a matrix takes does not depend on its size.

Rows are independent of each other when each has parameters of its own, so that rounding them in runs gives the same
codes. A run is cut between heads where the rows of a head are reordered on their way into the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch import Tensor

from quantforge.events import Event
from quantforge.model.statistics import Statistics
from quantforge.numerics.threads import in_order, total
from quantforge.packers.tensor import QuantizedTensor
from quantforge.planning.peak_memory import RUN_ELEMENTS
from quantforge.plans import TensorPlan
from quantforge.quantizers import Rounded, rounder_of
from quantforge.recipe import Recipe


def row_runs(tensor: TensorPlan) -> Iterator[tuple[int, int]]:
    """Yield runs of rows of about `RUN_ELEMENTS` weights."""
    rows, columns = tensor.matrix
    head = rows // tensor.heads if tensor.heads else 1
    step = max(1, RUN_ELEMENTS // (columns * head)) * head
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def round_rows(
    tensor: TensorPlan,
    importance: Tensor | None,
    recipe: Recipe,
    read: Callable[[int, int], Tensor],
    write: Callable[[int, QuantizedTensor], None],
    workers: int = 1,
) -> dict[str, Any]:
    """Round a matrix and write it; returns the events and the relative error as a record of the journal.

    Args:
        tensor: what is planned.
        importance: mean squares of the columns, where they are known.
        recipe: how to round.
        read: rows of the source as float32.
        write: takes the first row and the rounded run, in order.
        workers: runs that are read and rounded side by side.
    """
    assert tensor.scheme is not None
    statistics = Statistics(tokens=int(importance is not None), squares=importance)
    schemes = {tensor.name: tensor.scheme.weight}
    events: dict[str, Event] = {}
    errors, sizes = [], []

    def rounded_run(run: tuple[int, int]) -> tuple[int, Rounded, float]:
        weight = read(*run)
        found = rounder_of("rtn").round_shared(
            {tensor.name: weight}, statistics, schemes, recipe.rounding
        )
        return run[0], found[tensor.name], total(weight.square())

    with closing(in_order(rounded_run, row_runs(tensor), workers)) as runs:
        for first, rounded, size in runs:
            write(first, rounded.tensor)
            sizes.append(size)
            errors.append(rounded.figures.get("error", 0.0) * size)
            for event in rounded.events:
                known = events.get(event.kind)
                events[event.kind] = event if known is None else _added(known, event)
    error = math.fsum(errors) / math.fsum(sizes) if any(sizes) else 0.0
    return {
        "events": [event.to_json() for event in events.values()],
        "figures": {tensor.name: {"error": error}},
    }


def _added(one: Event, other: Event) -> Event:
    """Join what two runs lose: each says how many of one thing."""
    count, _, what = one.detail.partition(" ")
    return replace(one, detail=f"{int(count) + int(other.detail.partition(' ')[0])} {what}")
