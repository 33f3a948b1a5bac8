"""Windows: which layers look at the last few tokens alone, as transformers reads a configuration.

A configuration lists the layers (``layer_types``), or the family has a rule: all of them, all but every n-th, or those
from a number on. The width is ``sliding_window``; some families ask for ``use_sliding_window`` as well. Layers that
look at their chunk of the tokens alone keep, as those with a window, no more than its width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.architectures.dimensions import layer_types
from quantforge.errors import InputError

WORD = "sliding_attention"  # in ``layer_types``


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Which layers of a family have a sliding window.

    Attributes:
        known: whether the family has windows at all.
        width: where a configuration does not state it; 0 for none.
        width_key: the key that states it.
        word: that ``layer_types`` has for layers with one.
        flags_key: the key that may hold a list with 1 for layers with one and 0 for others; it counts before a period.
        asked: whether ``use_sliding_window`` has to be true.
        every: they hold for all layers; ``layer_types`` counts only with ``listed``.
        listed: whether ``layer_types`` counts.
        period: all layers but one of so many have one, 0 for no such rule.
        period_key: the key that may state the period.
        full_first: that one is the first of the period, not the last.
        full_last: the last layer has none, whatever is listed.
        idle: whether transformers takes a width of null where no layer of ``layer_types`` has one.
        start, stop: keys that bound the layers that may have one, each with its value where it is left out.
    """

    known: bool = True
    width: int = 0
    width_key: str = "sliding_window"
    word: str = WORD
    flags_key: str = ""
    asked: bool = False
    every: bool = False
    listed: bool = True
    period: int = 0
    period_key: str = ""
    full_first: bool = False
    full_last: bool = False
    idle: bool = False
    start: tuple[str, int] | None = None
    stop: tuple[str, int] | None = None

    def check(self, config: Mapping[str, Any], layers: int) -> None:
        """Refuse configurations that transformers cannot build masks for: a missing width, or flags that do not fit.

        Args:
            config: of the text model.
            layers: their number.

        Raises:
            InputError: naming the key.
        """
        listed = layer_types(config) if self.listed else None
        if self.flags_key and listed is None:
            _flags(config, self.flags_key, layers)
        needed = self.period > 0 and not self.asked and not (self.idle and listed is not None)
        missing = self.known and config.get(self.width_key, self.width) is None
        if missing and (needed or self.word in (listed or ())):
            raise InputError(
                f"config.json: {self.width_key} = null, and layers of the family have windows",
                "a number of tokens; transformers does not run such a model",
            )

    def of_layers(self, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of every layer in tokens, 0 where it sees all of them.

        Args:
            config: of the text model, its widths and lists checked (`quantforge.architectures.dimensions`).
            layers: their number.

        Raises:
            InputError: the configuration does not say which layers have one.
        """
        width = config.get(self.width_key, self.width) or 0
        if not self.known or not width or (self.asked and not config.get("use_sliding_window")):
            return (0,) * layers
        listed = layer_types(config) if self.listed else None
        if listed is not None:
            found = tuple(width * (word == self.word) for word in listed)
        elif flags := _flags(config, self.flags_key, layers):
            found = tuple(width * flag for flag in flags)
        else:
            found = tuple(width * self._slides(config, index) for index in range(layers))
        return (*found[:-1], 0) if self.full_last else found

    def _slides(self, config: Mapping[str, Any], index: int) -> bool:
        first, last = (
            0 if self.start is None else _number(config, *self.start),
            None if self.stop is None else _number(config, *self.stop),
        )
        if index < first or (last is not None and index >= last):
            return False
        if not self.period:
            if not (self.every or self.start):
                raise InputError(
                    "config.json: layer_types is missing", "list the layers with a window"
                )
            return True
        period = _number(config, self.period_key, self.period) if self.period_key else self.period
        return (index if self.full_first else index + 1) % max(1, period) != 0


NONE = WindowRule(known=False)


def _flags(config: Mapping[str, Any], key: str, layers: int) -> list[int]:
    """Return a flag of every layer; an empty list where none are stated.

    Raises:
        InputError: it is no list of flags, or of another number of layers.
    """
    flags = config.get(key) or []
    known = isinstance(flags, list) and all(type(flag) is int and flag in {0, 1} for flag in flags)
    if not known or len(flags) not in {0, layers}:
        raise InputError(
            f"config.json: {key} = {str(flags)[:60]}", f"a list of {layers}, each of them 0 or 1"
        )
    return flags


def _number(config: Mapping[str, Any], key: str, otherwise: int) -> int:
    """Return a number of layers.

    Raises:
        InputError: it is none.
    """
    value = config.get(key, otherwise)
    if type(value) is not int or value < 0:
        raise InputError(f"config.json: {key} = {str(value)[:40]!r}", "a number of layers")
    return value
