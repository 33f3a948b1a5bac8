"""Sliding windows: which layers use sliding-window attention, as transformers reads a configuration.

A configuration lists the layers (``layer_types``), or the family has a rule: all layers, all but every n-th, or those
from some index on. The width is ``sliding_window``; some families also require ``use_sliding_window``. Layers with
chunked attention keep no more tokens than their chunk size either, and count as windowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.architectures.dimensions import listed_layer_types
from quantforge.errors import InputError

SLIDING = "sliding_attention"  # in ``layer_types``


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Which layers of a family have a sliding window.

    Attributes:
        has_windows: whether the family has windows at all.
        width: default width; 0 for none.
        width_key: the configuration key of the width.
        layer_type: the value in ``layer_types`` of layers with a window.
        flags_key: a key that may hold a list with 1 for layers with a window and 0 for others; it overrides a period.
        needs_use_sliding_window: whether ``use_sliding_window`` has to be true.
        every_layer: all layers have a window, unless ``layer_types`` is used.
        uses_layer_types: whether ``layer_types`` is used.
        period: one layer in each run of this many has no window, 0 for no such rule.
        period_key: a key that may hold the period.
        full_first: that layer is the first of the run, not the last.
        full_last: the last layer has no window in any case.
        accepts_null_width: whether transformers accepts a null width if no layer in ``layer_types`` has a window.
        start, stop: keys of the first layer with a window and the end of these layers, each with its default.
    """

    has_windows: bool = True
    width: int = 0
    width_key: str = "sliding_window"
    layer_type: str = SLIDING
    flags_key: str = ""
    needs_use_sliding_window: bool = False
    every_layer: bool = False
    uses_layer_types: bool = True
    period: int = 0
    period_key: str = ""
    full_first: bool = False
    full_last: bool = False
    accepts_null_width: bool = False
    start: tuple[str, int] | None = None
    stop: tuple[str, int] | None = None

    def check(self, config: Mapping[str, Any], layers: int) -> None:
        """Refuse configurations for which transformers cannot build masks: a missing width, or invalid flags.

        Args:
            config: configuration of the text model.
            layers: number of layers.

        Raises:
            InputError: naming the key.
        """
        uses_layer_types = listed_layer_types(config) if self.uses_layer_types else None
        if self.flags_key and uses_layer_types is None:
            _read_flags(config, self.flags_key, layers)
        rule_needs_width = (
            self.period > 0
            and not self.needs_use_sliding_window
            and not (self.accepts_null_width and uses_layer_types is not None)
        )
        is_missing = self.has_windows and config.get(self.width_key, self.width) is None
        if is_missing and (rule_needs_width or self.layer_type in (uses_layer_types or ())):
            raise InputError(
                f"{self.width_key} = null, and layers of the family have windows",
                "a number of tokens; transformers does not run such a model",
                subject="config.json",
            )

    def of_layers(self, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of every layer in tokens, 0 for full attention.

        Args:
            config: configuration of the text model, with checked widths and lists
                (`quantforge.architectures.dimensions`).
            layers: number of layers.

        Raises:
            InputError: the configuration does not determine which layers have a window.
        """
        width = config.get(self.width_key, self.width) or 0
        if (
            not self.has_windows
            or not width
            or (self.needs_use_sliding_window and not config.get("use_sliding_window"))
        ):
            return (0,) * layers
        uses_layer_types = listed_layer_types(config) if self.uses_layer_types else None
        if uses_layer_types is not None:
            windows = tuple(
                width * (layer_type == self.layer_type) for layer_type in uses_layer_types
            )
        elif flags := _read_flags(config, self.flags_key, layers):
            windows = tuple(width * flag for flag in flags)
        else:
            windows = tuple(width * self._has_window(config, index) for index in range(layers))
        return (*windows[:-1], 0) if self.full_last else windows

    def _has_window(self, config: Mapping[str, Any], index: int) -> bool:
        first, last = (
            0 if self.start is None else _read_layer_count(config, *self.start),
            None if self.stop is None else _read_layer_count(config, *self.stop),
        )
        if index < first or (last is not None and index >= last):
            return False
        if not self.period:
            if not (self.every_layer or self.start):
                raise InputError(
                    "layer_types is missing", "list the layers with a window", subject="config.json"
                )
            return True
        period = (
            _read_layer_count(config, self.period_key, self.period)
            if self.period_key
            else self.period
        )
        return (index if self.full_first else index + 1) % max(1, period) != 0


NO_WINDOWS = WindowRule(has_windows=False)


def _read_flags(config: Mapping[str, Any], key: str, layers: int) -> list[int]:
    """Return a window flag for every layer; an empty list if the key is missing.

    Raises:
        InputError: it is not a list of flags, or has the wrong length.
    """
    flags = config.get(key) or []
    is_valid = isinstance(flags, list) and all(
        type(flag) is int and flag in {0, 1} for flag in flags
    )
    if not is_valid or len(flags) not in {0, layers}:
        raise InputError(
            f"{key} = {str(flags)[:60]}",
            f"a list of {layers}, each of them 0 or 1",
            subject="config.json",
        )
    return flags


def _read_layer_count(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return a number of layers from a configuration.

    Raises:
        InputError: it is not a number.
    """
    value = config.get(key, default)
    if type(value) is not int or value < 0:
        raise InputError(
            f"{key} = {str(value)[:40]!r}", "a number of layers", subject="config.json"
        )
    return value
