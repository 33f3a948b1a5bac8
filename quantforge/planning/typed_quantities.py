"""Parse quantities that users type: numbers of tokens, bytes, rates and prices."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quantforge.errors import UsageError

_TOKEN_UNITS: Mapping[str, int] = {"": 1, "k": 1 << 10, "K": 1 << 10, "m": 1 << 20, "M": 1 << 20}
_DECIMAL_UNITS = {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
BYTES: Mapping[str, float] = {
    **_DECIMAL_UNITS, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_BANDWIDTH_UNITS: Mapping[str, float] = {f"{unit}/s": size for unit, size in BYTES.items()}
_COMPUTE_UNITS: Mapping[str, float] = {"GFLOPS": 1e9, "TFLOPS": 1e12, "PFLOPS": 1e15}
_MAX_VALUE = 1e18


def tokens(text: str, option: str) -> int:
    """Parse ``8192``, ``32k`` (32,768 tokens, as engines count) or ``1M`` (1,048,576).

    Raises:
        UsageError: it is not a number of tokens; the message names ``option``.
    """
    number = _parse_quantity(
        text, _TOKEN_UNITS, option, "a number of tokens: 8192, 32k (32,768) or 1M (1,048,576)"
    )
    if number != int(number):
        raise UsageError(f"{option} {text}: {number:g} tokens", "a whole number: 8192 or 32k")
    return int(number)


def memory(text: str, option: str) -> float:
    """Parse ``24GB`` (24e9 bytes) or ``24GiB`` (25.8e9); errors as `tokens`."""
    return _parse_quantity(
        text, BYTES, option, "bytes with a unit: 24GB (24e9 bytes), 24GiB (25.8e9)"
    )


def bandwidth(text: str, option: str) -> float:
    """Parse ``3.35TB/s`` or ``936GB/s`` into bytes per second; errors as `tokens`."""
    return _parse_quantity(
        text, _BANDWIDTH_UNITS, option, "bytes per second with a unit: 3.35TB/s or 936GB/s"
    )


def compute(text: str, option: str) -> float:
    """Parse ``989TFLOPS`` into operations per second; errors as `tokens`."""
    return _parse_quantity(
        text, _COMPUTE_UNITS, option, "operations per second with a unit: 989TFLOPS"
    )


def price(text: str, option: str) -> float:
    """Parse ``2.5/h``, a price per hour in any currency; errors as `tokens`."""
    return _parse_quantity(
        text, {"/h": 1.0}, option, "a price for an hour without a currency: 2.5/h"
    )


def _parse_quantity(text: str, units: Mapping[str, float], option: str, expected: str) -> float:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z/]*)", text)
    if match is None or match[2] not in units:
        raise UsageError(f"{option} {text}: not understood", expected)
    value = float(match[1]) * units[match[2]]
    if not 0 < value <= _MAX_VALUE:
        raise UsageError(f"{option} {text}: out of range", expected)
    return value
