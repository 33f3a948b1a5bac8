"""Transforms of a method, one after the other, on a part of the model: a block, or one of its experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quantforge.execution.record import Record, merge
from quantforge.quantizers import transform_of

if TYPE_CHECKING:
    from quantforge.model.block import BlockPart
    from quantforge.model.statistics import Statistics
    from quantforge.plans import TensorPlan
    from quantforge.recipe import Rounding


def transformed(
    transforms: Sequence[str],
    part: BlockPart,
    observed: Mapping[str, Statistics],
    targets: Mapping[str, TensorPlan],
    options: Rounding,
) -> tuple[Record, dict[str, Statistics]]:
    """Apply transforms to a part; return what there is to tell, and the statistics of what it has become.

    Args:
        transforms: keys of the methods.
        part: the block whose weights change.
        observed: by shared input.
        targets: linears that are rounded afterwards, by their names in the block.
        options: of rounding.
    """
    layers = {name: tensor.scheme for name, tensor in targets.items() if tensor.scheme}
    schemes = {name: layer.weight for name, layer in layers.items()}
    record: Record = {}
    for transform in transforms if layers else ():
        observed, events, figures = transform_of(transform).apply(
            part, observed, schemes, options, layers
        )
        merge(record, {"events": [event.to_json() for event in events], "transform": figures})
    return record, dict(observed)
