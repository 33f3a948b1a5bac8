"""Overrides of layers: values of a configuration that some layers have of their own, as ``per_layer_config`` says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quantforge.errors import InputError

KEY = "per_layer_config"


def own_values(config: Mapping[str, Any], layers: Iterable[int]) -> Mapping[str, Any] | None:
    """Return what some layers, and no others, have in the place of the configuration's values.

    Args:
        config: of the text model, with the family's defaults.
        layers: that may have values of their own, the same in all of them.

    Returns:
        None: where layers that are not among them have any, or they differ from one another.

    Raises:
        InputError: the configuration states no mapping of layers to values.
    """
    found = {index: dict(values) for index, values in _stated(config).items()}
    for values in found.values():
        for name in [name for name, value in values.items() if config.get(name) == value]:
            del values[name]
    first, *rest = ([found.pop(index, {}) for index in layers]) or [{}]
    alone = not any(found.values()) and all(values == first for values in rest)
    return first if alone else None


def _stated(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    stated = config.get(KEY) or {}
    known = isinstance(stated, Mapping) and all(
        isinstance(values, Mapping) and str(index).isdecimal() for index, values in stated.items()
    )
    if not known:
        raise InputError(f"config.json: {KEY} = {str(stated)[:60]}", "values by number of layer")
    return {int(index): values for index, values in stated.items()}
