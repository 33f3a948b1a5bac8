"""Transforms of a method, one after the other, on a part of the model: a block, or one of its experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quantforge.execution.journal import Record, merge
from quantforge.quantizers import is_sparse, transform_of
from quantforge.quantizers.sparsity import figures, sparsify

if TYPE_CHECKING:
    from quantforge.model.block import BlockPart
    from quantforge.model.statistics import Statistics
    from quantforge.plans import TensorPlan
    from quantforge.recipe import Rounding
    from quantforge.scheme import Sparsity


def transformed(
    transforms: Sequence[str],
    part: BlockPart,
    observed: Mapping[str, Statistics],
    targets: Mapping[str, TensorPlan],
    rounding: Rounding,
    zeros: Sparsity | None,
) -> tuple[Record, dict[str, Statistics]]:
    """Apply transforms to a part, in place; return their record, and the statistics that hold afterwards.

    Args:
        transforms: keys of the methods.
        part: the block whose weights change.
        observed: by shared input.
        targets: linears that are rounded afterwards, or get zeros, by their names in the block.
        rounding: options of rounding.
        zeros: their pattern, where a transform makes some.
    """
    layers = {name: tensor.scheme for name, tensor in targets.items() if tensor.scheme}
    schemes = {name: layer.weight for name, layer in layers.items()}
    record: Record = {}
    for transform in transforms if targets else ():
        if is_sparse(transform):
            assert zeros is not None  # planning has refused the method without
            merge(record, _with_zeros(transform, part, observed, targets, rounding, zeros))
            continue
        observed, events, figures = transform_of(transform).apply(
            part, observed, schemes, rounding, layers
        )
        merge(record, {"events": [event.to_json() for event in events], "transform": figures})
    return record, dict(observed)


def _with_zeros(
    method: str,
    part: BlockPart,
    observed: Mapping[str, Statistics],
    targets: Mapping[str, TensorPlan],
    rounding: Rounding,
    zeros: Sparsity,
) -> Record:
    """Make weights of a part zero, one shared input after the other; arguments as of `transformed`."""
    record: Record = {}
    for shared in part.inputs:
        names = [name for name in shared.linears if name in targets and targets[name].sparse]
        if not names or shared.key not in observed:
            continue
        weights = {targets[name].name: part.weight(name) for name in names}
        statistics, damping = observed[shared.key], rounding.gptq.damping
        found, events = sparsify(method, weights, statistics, zeros, damping)
        merge(record, {"events": [event.to_json() for event in events]})
        for name in names:
            key = targets[name].name
            merge(record, {"figures": {key: figures(weights[key], found[key], statistics)}})
            part.set_weight(name, found[key])
    return record
