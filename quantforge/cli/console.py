"""The only place that prints: stdout carries data, stderr everything else.

A terminal gets tables and one updating progress line, a pipe or a log gets one plain line per part. With ``--json``
stdout is exactly one document.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from quantforge.errors import QuantForgeError

UNITS = ("B", "KB", "MB", "GB", "TB")


class Console:
    """Output of one command; ``quiet`` drops progress and notes, ``as_json`` replaces tables by a document."""

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self._updating = sys.stderr.isatty()
        self._open_line = False

    def document(self, data: Mapping[str, Any]) -> None:
        """Write one JSON document to stdout, in ASCII; what is no number or infinite becomes null."""
        sys.stdout.write(json.dumps(_plain(data), indent=2, allow_nan=False) + "\n")
        sys.stdout.flush()

    def text(self, text: str = "") -> None:
        """Write lines of data to stdout, without control characters."""
        sys.stdout.write(printable(text) + "\n")

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
        """Write a table to stdout: drawn on a terminal, aligned columns elsewhere."""
        if title:
            self.text(title)
        numbers = [_is_numeric([row[index] for row in rows]) for index in range(len(headers))]
        if sys.stdout.isatty():
            from rich.console import Console as Rich
            from rich.table import Table
            from rich.text import Text

            drawn = Table(box=None, pad_edge=False, header_style="bold")
            for header, number in zip(headers, numbers, strict=True):
                drawn.add_column(header, justify="right" if number else "left", overflow="fold")
            for row in rows:
                drawn.add_row(*(Text(printable(cell)) for cell in row))
            Rich().print(drawn)
            return
        widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
        for row in [headers, *rows]:
            cells = [
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(row, widths, numbers, strict=True)
            ]
            self.text("  ".join(cells).rstrip())

    def note(self, text: str) -> None:
        """Write a note to stderr unless quiet."""
        if not self.quiet:
            self._finish_line()
            sys.stderr.write(printable(text) + "\n")

    def detail(self, text: str) -> None:
        """Write a note that only ``-v`` shows."""
        if self.verbose:
            self.note(text)

    def progress(self, text: str, *, last: bool = False) -> None:
        """Show progress: one line that is rewritten on a terminal, one line each elsewhere."""
        if self.quiet:
            return
        text = printable(text).replace("\n", "\\n")
        if not self._updating:
            sys.stderr.write(text + "\n")
        else:
            sys.stderr.write(f"\r\x1b[2K{text}")
            self._open_line = not last
            if last:
                sys.stderr.write("\n")
        sys.stderr.flush()

    def error(self, error: QuantForgeError) -> None:
        """Report a typed error: text, or an error object with ``--json``."""
        self._finish_line()
        if self.as_json:
            fields = {"code": error.code, "message": error.message, "hint": error.hint}
            fields |= {k: v for k, v in (("file", error.file), ("tensor", error.tensor)) if v}
            sys.stderr.write(json.dumps({"error": fields}) + "\n")
            return
        sys.stderr.write(f"error: {printable(error.message)}\n")
        if error.hint:
            sys.stderr.write(f"hint: {printable(error.hint)}\n")

    def _finish_line(self) -> None:
        if self._open_line:
            sys.stderr.write("\n")
            self._open_line = False


def _is_numeric(cells: Sequence[str]) -> bool:
    """Return whether a column holds figures (or a dash where there is none), which are aligned right."""
    return all(cell[:1] in "-+0123456789" for cell in cells)


def printable(text: str) -> str:
    """Escape control, bidirectional and unpaired characters: names in hostile files must not drive a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def size(nbytes: float) -> str:
    """Return a size for people, in decimal units."""
    value = float(nbytes)
    for unit in UNITS:
        if value < 1000 or unit == UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
