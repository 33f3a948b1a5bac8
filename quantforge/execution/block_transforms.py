"""Transforms of a block in a calibrated run: apply those of the method to its weights, and set weights to zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quantforge.execution.journal import Record, merge_records
from quantforge.model.statistics import Statistics
from quantforge.quantizers import is_sparse, load_transform
from quantforge.quantizers.sparsity import sparsify, sparsity_figures

if TYPE_CHECKING:
    from quantforge.model.block import DecoderBlock
    from quantforge.planning.planner import Planned
    from quantforge.plans import TensorPlan


def apply_transforms(
    planned: Planned,
    block: DecoderBlock,
    statistics: Mapping[str, Statistics],
    targets: Mapping[str, TensorPlan],
) -> tuple[Record, dict[str, Statistics]]:
    """Apply the transforms in order to a block or one of its experts, in place.

    Args:
        planned: the plan and its recipe.
        block: the block whose weights change.
        statistics: statistics by shared input.
        targets: linears that are rounded or sparsified, by their names in the block.

    Returns:
        The record, and the statistics after the transforms.
    """
    layers = {name: tensor.scheme for name, tensor in targets.items() if tensor.scheme}
    record: Record = {}
    for transform in planned.plan.transforms if targets else ():
        if is_sparse(transform):
            merge_records(record, _sparsify(planned, transform, block, statistics, targets))
            continue
        statistics, events, changes = load_transform(transform).apply(
            block, statistics, layers, planned.recipe.rounding
        )
        merge_records(
            record, {"events": [event.to_json() for event in events], "transform": changes}
        )
    return record, dict(statistics)


def _sparsify(
    planned: Planned,
    method: str,
    block: DecoderBlock,
    statistics: Mapping[str, Statistics],
    targets: Mapping[str, TensorPlan],
) -> Record:
    """Set weights of a block to zero, one shared input after the other; arguments as `apply_transforms`."""
    zeros, damping = planned.recipe.zeros, planned.recipe.rounding.gptq.damping
    assert zeros is not None  # planning refuses sparsity without options
    record: Record = {}
    for shared in block.inputs:
        names = [name for name in shared.linears if name in targets and targets[name].sparse]
        if not names or shared.key not in statistics:
            continue
        weights = {targets[name].name: block.weight(name) for name in names}
        input_statistics = statistics[shared.key]
        sparse_weights, events = sparsify(method, weights, input_statistics, zeros, damping)
        merge_records(record, {"events": [event.to_json() for event in events]})
        for name in names:
            key = targets[name].name
            merge_records(
                record,
                {
                    "metrics": {
                        key: sparsity_figures(weights[key], sparse_weights[key], input_statistics)
                    }
                },
            )
            block.set_weight(name, sparse_weights[key])
    return record
