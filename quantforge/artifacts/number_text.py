"""Format figures as text: three significant digits, and sizes in decimal units."""

from __future__ import annotations

UNITS = ("B", "kB", "MB", "GB", "TB")
DIGITS = 3
MIN_EXPONENT = -5  # smaller numbers are written with an exponent


def significant(value: float, *, sign: bool = False) -> str:
    """Return a number with three significant digits: ``0.00547``, ``1.20``, ``1890``, ``1.02e-06``.

    Args:
        value: a finite number.
        sign: whether to write a plus sign.
    """
    sign_option = "+" if sign else ""
    exponent = int(f"{value:.{DIGITS - 1}e}".partition("e")[2])  # after rounding
    if value and exponent < MIN_EXPONENT:
        return f"{value:{sign_option}.{DIGITS - 1}e}"
    decimals = DIGITS - 1 - exponent if value else 0
    return f"{round(value, decimals):{sign_option}.{max(0, decimals)}f}"


def value_and_error(value: float, error: float | None) -> str:
    """Return a number as `significant` does, followed by its standard error with the same number of decimals."""
    text = significant(value)
    if error is None:
        return text
    error_text = f"{error:.{len(text.partition('.')[2])}f}"
    if "e" in text or (error and not float(error_text)):
        exponent = int(f"{error:.0e}".partition("e")[2])
        scientific = "e" in text or exponent < MIN_EXPONENT
        error_text = f"{error:.0e}" if scientific else f"{error:.{-exponent}f}"
    return f"{text} ± {error_text}"


def size_and_bytes(nbytes: int) -> str:
    """Return a number of bytes as `size` does, and exactly: ``3.72 MB (3,724,224 bytes)``."""
    return f"{size(nbytes)} ({nbytes:,} bytes)"


def size(nbytes: float) -> str:
    """Return a number of bytes with three significant digits, in decimal units."""
    value = float(nbytes)
    for unit in UNITS:
        if round(value) < 1000 or unit == UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{significant(value)} {unit}"
        value /= 1000
    raise AssertionError
