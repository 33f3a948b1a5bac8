"""Config groups of compressed-tensors, as they are read: which module has which scheme and format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.errors import InputError
from quantforge.formats.configuration import listed
from quantforge.formats.ct_arguments import (
    INTEGERS,
    MIXED,
    NAIVE,
    PACKED,
    READ,
    format_name,
    read_input,
    read_weights,
)
from quantforge.formats.module_names import Names
from quantforge.scheme import LayerScheme

DAMAGED = "quantization_config is damaged: get the model again"


SCATTERED = (
    "group",
    "dynamic",
    True,
)  # `actorder` with an index of groups; the others leave columns in order


@dataclass(frozen=True, slots=True)
class Group:
    """Content of a config group: the scheme of its modules, the format, and whether columns are scattered."""

    targets: Names
    layer: LayerScheme
    kind: str
    scattered: bool

    def rank(self, module: str) -> int | None:
        """Return how nearly the group targets a module: 0 by name, 1 by pattern, 2 by class; None where it does not."""
        found = self.targets.rank(module)
        if found is None and any(self.targets.rank(kind) == 0 for kind in ("Linear", "Embedding")):
            return 2
        return found


def group_of(group: object, config: Mapping[str, Any]) -> Group:
    """Return what a config group says.

    Raises:
        InputError: it is no group, or says what is not read.
    """
    if not isinstance(group, Mapping):
        raise InputError("config.json: a config group is not a table", DAMAGED)
    kind = group.get("format") or config.get("format") or MIXED
    if kind not in (*READ, MIXED):
        raise InputError(
            f"config.json: compressed-tensors format {kind!r} is not read", f"{', '.join(READ)} are"
        )
    weights = group.get("weights")
    layer = LayerScheme(read_weights(weights), read_input(group.get("input_activations")))
    expected = {format_name(layer), NAIVE, MIXED}
    if layer.weight.grid == "int8":
        expected |= {PACKED, INTEGERS}
    if kind not in expected:
        raise InputError(
            f"config.json: {layer} in a group of format {kind!r}", f"{format_name(layer)} holds it"
        )
    scattered = weights.get("actorder") in SCATTERED if isinstance(weights, Mapping) else False
    return Group(Names(listed(group, "targets")), layer, str(kind), scattered)


def group_for(module: str, groups: Iterable[Group]) -> Group:
    """Return the group that speaks of a module: by its name first, then by pattern, then by class.

    Raises:
        InputError: none does.
    """
    ranked = [(rank, group) for group in groups if (rank := group.rank(module)) is not None]
    if not ranked:
        raise InputError(
            f"{module}: no config group in config.json targets it",
            "config_groups is incomplete",
            tensor=module,
        )
    return min(ranked, key=lambda item: item[0])[1]
