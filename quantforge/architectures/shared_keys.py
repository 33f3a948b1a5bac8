"""Layers that read the keys and values of an earlier layer of their type, and make none: the last ones of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantforge.errors import InputError

COUNT = "num_kv_shared_layers"


def first_shared(config: Mapping[str, Any], words: Sequence[str]) -> int:
    """Return the number of the first layer that makes no keys of its own; behind the last where all do.

    Args:
        config: of the text model.
        words: the type of every layer.

    Raises:
        InputError: ``num_kv_shared_layers`` is no number of layers, or one of these has no earlier one of its type.
    """
    count = config.get(COUNT) or 0
    if type(count) is not int or not 0 <= count < max(len(words), 1):
        raise InputError(f"config.json: {COUNT} = {str(count)[:40]!r}", "a number of layers")
    first = len(words) - count
    if {*words[first:]} - {*words[:first]}:
        raise InputError(
            f"config.json: {COUNT} = {count}: no earlier layer makes keys for all of these",
            "compare it with the model's publication",
        )
    return first
