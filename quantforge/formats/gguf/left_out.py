"""Events for what llama.cpp's graph of a family leaves out: windows, and ends of a range of frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.architectures import architecture_of
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.llama_cpp import Family
from quantforge.events import Event
from quantforge.formats.gguf.rope import Rope
from quantforge.formats.gguf.yarn_range import rounding


def left_out(
    config: Mapping[str, Any], family: Family, sizes: Dimensions, rope: Rope
) -> tuple[Event, ...]:
    """Return events for frequencies that llama.cpp rounds, and for a sliding window that it does not have.

    ``config`` is with the family's defaults.
    """
    said = rounding(rope)
    rounded = (Event("rope-rounded", "config.json", f"truncate = false: {said}"),) if said else ()
    window = config.get("sliding_window", family.window)
    if window is None or sizes.positions <= window or family.windowed:
        return rounded
    declared = architecture_of(config)
    rule = declared.windows if declared else None
    if rule is None or not any(rule.of_layers(config, sizes.layers)):
        return rounded
    text = f"llama.cpp's {family.arch} has no sliding window: equal up to {window} tokens"
    return (*rounded, Event("window-left-out", "config.json", text))
