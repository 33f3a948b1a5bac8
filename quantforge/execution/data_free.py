"""Worker on units that look at no data: what is kept is copied, the rest is rounded to nearest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from quantforge.execution.progress import tell
from quantforge.execution.journal import Record, merge
from quantforge.execution.units import HEAD
from quantforge.model.statistics import Statistics
from quantforge.numerics.threads import Behind
from quantforge.planning.peak_memory import in_strips
from quantforge.plans import Action, Plan
from quantforge.quantizers import PLAIN

if TYPE_CHECKING:
    from quantforge.execution.rounding import MatrixRounding
    from quantforge.execution.units import Unit
    from quantforge.plans import TensorPlan


class DataFree:
    """Worker on units without calibration; ``rounding`` is what it rounds and writes with."""

    def __init__(self, plan: Plan, rounding: MatrixRounding) -> None:
        self._plan, self.rounding = plan, rounding

    def work(self, unit: Unit) -> Record:
        """Copy what a unit keeps and round the rest to nearest; return its record. Errors as `Run.execute`."""
        if unit.name == HEAD:
            return self.head(unit, Statistics())
        record: Record = {}
        tensors = sorted(unit.tensors, key=_by_strips)  # matrices in strips are the last, in one go
        told = _told(tensors)
        with Behind(self.rounding.workers) as behind:
            for tensor in islice(told, len(tensors) - sum(map(_by_strips, tensors))):
                if tensor.action is Action.KEEP:
                    behind.do(partial(self.copy, tensor))
                elif tensor.action is Action.QUANTIZE and tensor.name not in record.get(
                    "figures", {}
                ):
                    behind.wait()
                    merge(record, self._whole(tensor))
            merge(record, self.rounding.rows(told, behind))
        return record

    def _whole(self, tensor: TensorPlan) -> Record:
        """Round a matrix, and with it those that share a parameter, and write them."""
        group, source = fitted_with(tensor, self._plan), self.rounding.source
        weights = {one.name: source.weight(one) for one in group}
        return self.rounding.shared(weights, self.rounding.known(tensor), PLAIN)

    def head(self, unit: Unit, statistics: Statistics) -> Record:
        """Round and write a quantized head; importance from a file takes the place of ``statistics``."""
        weights = {tensor.name: self.rounding.source.weight(tensor) for tensor in unit.tensors}
        for tensor in unit.tensors:
            if tensor.name in self.rounding.importance:
                statistics = self.rounding.known(tensor)
        return self.rounding.shared(weights, statistics) if weights else {}

    def copy(self, tensor: TensorPlan) -> None:
        """Write a tensor as the source has it."""
        source, output = self.rounding.source, self.rounding.output
        if not tensor.stored[0].shape or output.storage.whole(tensor):
            output.keep(tensor, source.whole(tensor))
        else:
            output.keep_in_runs(tensor, partial(source.rows, tensor))


def _told(tensors: list[TensorPlan]) -> Iterator[TensorPlan]:
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
