"""Planned tensors of a block: those that are quantized, sparsified or left unquantized, by their names in the block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantforge.plans import Action, Plan

if TYPE_CHECKING:
    from quantforge.execution.unit_output import UnitOutput
    from quantforge.model.block import DecoderBlock
    from quantforge.plans import TensorPlan


class BlockTensors:
    """Lookup of the planned tensors of a block.

    Args:
        plan: the plan.
        output: writer of the tensors.
    """

    def __init__(self, plan: Plan, output: UnitOutput) -> None:
        self._by_name = {tensor.name: tensor for tensor in plan.tensors}
        self._output = output

    def quantized_linears(self, block: DecoderBlock) -> dict[str, TensorPlan]:
        """Return the plans of the quantized linears of a block, by their names in the block."""
        plans = self.modified_linears(block)
        return {name: plan for name, plan in plans.items() if plan.action is Action.QUANTIZE}

    def modified_linears(self, block: DecoderBlock) -> dict[str, TensorPlan]:
        """Return the plans of the linears that are quantized or sparsified, by their names in the block."""
        plans = {name: self._by_name[block.stored_name(f"{name}.weight")] for name in block.linears}
        return {
            name: plan
            for name, plan in plans.items()
            if plan.sparse or plan.action is Action.QUANTIZE
        }

    def unquantized(self, block: DecoderBlock) -> dict[str, TensorPlan]:
        """Return the plans of the unquantized parameters of a block, including experts, by their names in the block."""
        plans = {local: self._by_name[block.stored_name(local)] for local in block.parameters()}
        return {local: plan for local, plan in plans.items() if plan.action is Action.KEEP}

    def load_written_parameters(self, block: DecoderBlock) -> None:
        """Replace the unquantized parameters of a block, except those of experts, by the written ones."""
        for local, tensor in self.unquantized(block).items():
            if tensor.expert >= 0 or block.is_outside_module(local):
                continue
            if tensor.negate_exp:
                # A decay never changes, and the logarithm of its stored form differs in the last bits.
                continue
            (value,) = self._output.read(tensor).values()
            block.set_parameter(
                local, self._output.storage.restore_unquantized(tensor, value).float()
            )
