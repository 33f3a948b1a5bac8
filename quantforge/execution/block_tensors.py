"""The tensors of a block as the plan has them, by their names inside of the block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantforge.plans import Action, Plan

if TYPE_CHECKING:
    from quantforge.execution.unit_output import UnitOutput
    from quantforge.model.block import BlockPart
    from quantforge.plans import TensorPlan


class BlockTensors:
    """Lookup of what a plan does with the tensors of a block.

    Args:
        plan: with every tensor.
        output: where the tensors are written.
    """

    def __init__(self, plan: Plan, output: UnitOutput) -> None:
        self._by_name = {tensor.name: tensor for tensor in plan.tensors}
        self._output = output

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

    def load_kept(self, part: BlockPart) -> None:
        """Let the kept parameters of a block, but those of its experts, be what was written of them."""
        for local, tensor in self.kept(part).items():
            if tensor.expert >= 0 or part.is_apart(local):
                continue
            if tensor.decay:
                # Nothing changes a decay, and the logarithm of what is stored differs in its last bits.
                continue
            (value,) = self._output.read(tensor).values()
            part.set_parameter(local, self._output.storage.kept(tensor, value).float())
