"""Patterns of layers that llama.cpp knows by heart: which ones slide, and which have no rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.llama_cpp import Family
from quantforge.formats.gguf.stated_keys import refused


def check_windows(config: Mapping[str, Any], family: Family, sizes: Dimensions) -> None:
    """Raise `RefusedError` unless the last of every ``family.period`` layers alone has full attention."""
    period = family.period
    kinds = [
        "full_attention" if i % period == period - 1 else "sliding_attention"
        for i in range(sizes.layers)
    ]
    _check_list("layer_types", config.get("layer_types"), kinds)
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if config.get(key, period) != period:
            raise refused(f"{key} = {config[key]}", f"{period}")


def check_no_rope(config: Mapping[str, Any], period: int, sizes: Dimensions) -> None:
    """Raise `RefusedError` unless the last of every ``period`` layers alone has no rotary positions."""
    expected = [int((i + 1) % period != 0) for i in range(sizes.layers)]
    stated = config.get("no_rope_layers")
    if stated is None and config.get("no_rope_layer_interval", period) != period:
        raise refused(f"no_rope_layer_interval = {config['no_rope_layer_interval']}", f"{period}")
    _check_list("no_rope_layers", stated, expected)


def _check_list(key: str, stated: object, expected: Sequence[object]) -> None:
    if isinstance(stated, list) and stated[: len(expected)] != list(expected):
        raise refused(f"{key} = {stated[:8]}...", f"llama.cpp assumes {list(expected)[:8]}...")
