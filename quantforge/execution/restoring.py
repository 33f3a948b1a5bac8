"""Finished parts: checked against the journal, and put back into a block, which then computes what an engine will."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.packers.input_rounding import simulate
from quantforge.plans import Action, Plan

if TYPE_CHECKING:
    from quantforge.execution.record import Record
    from quantforge.execution.unit_output import UnitOutput
    from quantforge.model.block import BlockPart
    from quantforge.plans import TensorPlan


def check(records: Iterable[Record], output: UnitOutput, journal: Path) -> None:
    """Check the finished parts of an interrupted run against the checksums of its journal.

    Raises:
        IntegrityError: a tensor is not as it was written.
    """
    sums = {name: expected for record in records for name, expected in record["sums"].items()}
    for name, expected in sums.items():
        output.check(name, expected, f"start afresh: rm -r {journal}")


class Restoring:
    """Reader of what was written for a block.

    Args:
        plan: with every tensor.
        output: where the tensors were written.
        device: where weights are put.
        rounded_inputs: whether a block reads its quantized inputs rounded from then on.
    """

    def __init__(
        self, plan: Plan, output: UnitOutput, device: str, *, rounded_inputs: bool
    ) -> None:
        self._by_name = {tensor.name: tensor for tensor in plan.tensors}
        self._output, self._device = output, device
        self._rounded_inputs = rounded_inputs

    def targets(self, part: BlockPart) -> dict[str, TensorPlan]:
        """Return the linears of a block that are quantized, by their names inside of it."""
        plans = self.changing(part)
        return {name: plan for name, plan in plans.items() if plan.action is Action.QUANTIZE}

    def changing(self, part: BlockPart) -> dict[str, TensorPlan]:
        """Return the linears of a block that are quantized or get zeros, by their names inside of it."""
        plans = {name: self._by_name[part.stored_name(f"{name}.weight")] for name in part.linears}
        return {
            name: plan
            for name, plan in plans.items()
            if plan.sparse or plan.action is Action.QUANTIZE
        }

    def kept(self, part: BlockPart) -> dict[str, TensorPlan]:
        """Return the parameters of a block that are kept, by their names inside of it, those of experts included."""
        plans = {local: self._by_name[part.stored_name(local)] for local in part.parameters()}
        return {local: plan for local, plan in plans.items() if plan.action is Action.KEEP}

    def block(self, part: BlockPart) -> None:
        """Bring a block back to what it was when it was done, so that the hidden states see the same."""
        for name, tensor in self.targets(part).items():
            if tensor.expert < 0:
                self.linear(part, name, tensor)
        self.parameters(part)
        self.experts(part)

    def parameters(self, part: BlockPart) -> None:
        """Let the kept parameters of a block, but those of its experts, be what was written of them."""
        for local, tensor in self.kept(part).items():
            if tensor.expert < 0 and not part.is_apart(local):
                self._parameter(part, local, tensor)

    def experts(self, part: BlockPart) -> None:
        """Let every expert of a block, when it is read from then on, be what it was when it was done."""
        if part.experts is None:
            return
        targets, kept = self.targets(part), self.kept(part)

        def restore(number: int) -> None:
            for name, tensor in targets.items():
                if tensor.expert == number:
                    self.linear(part, name, tensor)
            for local, tensor in kept.items():
                if tensor.expert == number:
                    self._parameter(part, local, tensor)

        part.experts.restore_with(restore)

    def _parameter(self, part: BlockPart, local: str, tensor: TensorPlan) -> None:
        if (
            tensor.decay
        ):  # nothing changes them, and the logarithm of what is stored differs in its last bits
            return
        (value,) = self._output.read(tensor).values()
        part.set_parameter(local, self._output.storage.kept(tensor, value).float())

    def linear(self, part: BlockPart, name: str, tensor: TensorPlan) -> None:
        """Let a linear of a block compute with what was written for it."""
        written = self._output.storage.unpack(tensor, self._output.read(tensor))
        part.set_weight(name, written.decode().to(self._device))
        if self._rounded_inputs and tensor.scheme is not None and tensor.scheme.input is not None:
            scale, kept = written.parameters.get("input_scale"), written.outlier_columns
            part.round_inputs(
                name,
                partial(simulate, activation=tensor.scheme.input, scale=scale, kept=kept),
            )
