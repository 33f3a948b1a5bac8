"""The notation of a layer: its weight's scheme and, behind a plus sign, how its input is quantized.

``int8:row:sym+int8:token:dynamic`` reads: the weight in 8-bit integers with a scale per row, and the input of every
token rounded to 8-bit integers under its own scale. ``static`` stands for a range that calibration measured. A fourth
field is LLM.int8()'s threshold, a fifth the most columns of weights that are kept in 16 bits.
``parse_layer(str(layer)) == layer`` for every layer.
"""

from __future__ import annotations

import re

from quantforge.errors import InputError
from quantforge.scheme import ALIASES, GROUP, Activation, LayerScheme, grid_of, parse


def parse_layer(text: str) -> LayerScheme:
    """Parse the notation or an alias; errors as `quantforge.scheme.parse`."""
    weight, plus, activation = ALIASES.get(text.upper(), text).partition("+")
    return LayerScheme(parse(weight), _activation(activation) if plus else None)


def _activation(text: str) -> Activation:
    fields = text.lower().split(":")
    if not 2 <= len(fields) <= 5:
        raise InputError(f"activation '{text}': 2 to 5 fields", "e.g. int8:token:dynamic")
    fields += ["dynamic"] if len(fields) == 2 else []
    grid, granularity, mode = grid_of(text, fields[0]), fields[1], fields[2]
    if granularity not in {"token", "tensor"} and not GROUP.fullmatch(granularity):
        raise InputError(f"activation '{text}': '{granularity}'", "write token, tensor or g128")
    if mode not in {"dynamic", "static"} or (mode == "static" and granularity == "token"):
        raise InputError(f"activation '{text}': '{mode}'", "write token:dynamic or tensor:static")
    threshold, kept = _threshold(text, fields[3:4]), _kept(text, fields[4:])
    return Activation(grid, granularity, mode == "dynamic", threshold, kept)


def _threshold(text: str, fields: list[str]) -> float | None:
    if not fields:
        return None
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4})?", fields[0]) or not float(fields[0]):
        raise InputError(f"activation '{text}': threshold '{fields[0]}'", "a number, e.g. 6")
    return float(fields[0])


def _kept(text: str, fields: list[str]) -> int:
    if not fields:
        return 0
    if not re.fullmatch(r"[1-9][0-9]{0,4}", fields[0]):
        raise InputError(f"activation '{text}': '{fields[0]}' columns", "a number, e.g. 32")
    return int(fields[0])
