"""The only place that prints: stdout carries data, stderr everything else.

With ``--json`` stdout is exactly one document; with ``--json-progress`` stderr is JSON, line by line. The meters of
`quantforge.cli.progress_bar` draw progress.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from quantforge.cli.path_arguments import as_typed, in_one_line, option_as_typed, path_as_typed
from quantforge.cli.progress_bar import Bar, Lines, MachineLines, Meter, Silence
from quantforge.errors import QuantForgeError
from quantforge.evaluation.columns import GAP, Column, folded
from quantforge.progress import Progress

_KEPT_IN_TEXT = {"\t", "\u200c", "\u200d"}  # zero-width non-joiner and joiner
PIPE_WIDTH = 80  # characters, where there is no terminal
ENTRY_WIDTH = 17  # of the name of an entry, with the gap behind it


class Console:
    """Output of one command; ``quiet`` drops progress and notes, ``as_json`` replaces tables by a document.

    ``verbose`` adds details, ``machine`` makes progress, notes and errors lines of JSON.
    """

    def __init__(
        self,
        *,
        as_json: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        machine: bool = False,
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self._machine = machine
        self._meter: Meter = Silence()

    def document(self, data: Mapping[str, Any]) -> None:
        """Write one JSON document to stdout, in ASCII; what is no number or infinite becomes null."""
        sys.stdout.write(json.dumps(_plain(data), indent=2, allow_nan=False) + "\n")
        sys.stdout.flush()

    def text(self, text: str = "") -> None:
        """Write lines of data to stdout, without control characters."""
        sys.stdout.write(escaped(text) + "\n")

    def flush(self) -> None:
        """Make sure that whoever reads stdout has what was written."""
        sys.stdout.flush()

    def piece(self, text: str) -> None:
        """Write a piece of a generated text to stdout at once, see `escaped_text`."""
        sys.stdout.write(escaped_text(text))
        sys.stdout.flush()

    @property
    def terminal(self) -> bool:
        """Return whether stdout is a terminal."""
        return sys.stdout.isatty()

    @property
    def width(self) -> int:
        """Return the characters of a line of stdout: of the terminal, as ``COLUMNS`` says, or 80."""
        return shutil.get_terminal_size((PIPE_WIDTH, 24)).columns

    def wrapped(self, text: str) -> None:
        """Write a paragraph of data to stdout, broken into lines where words end."""
        self.text(self._filled(text))

    def entry(self, name: str, text: str) -> None:
        """Write a line of data under a name; a terminal gets as many as it takes, broken where words end."""
        indent = " " * ENTRY_WIDTH
        width = self.width if self.terminal else sys.maxsize
        self.text(
            textwrap.fill(
                escaped(text),
                width,
                initial_indent=f"{name:{ENTRY_WIDTH}}",
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
                replace_whitespace=False,
                drop_whitespace=True,
            )
        )

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
        """Write a table to stdout, see `columns`."""
        cells = [tuple(row[index] for row in rows) for index in range(len(headers))]
        self.columns([Column(header, c) for header, c in zip(headers, cells, strict=True)], title)

    def columns(self, columns: Sequence[Column], title: str = "") -> None:
        """Write a table to stdout: folded to a terminal, the best values bold; elsewhere as wide as it is."""
        from rich.console import Console as Rich
        from rich.table import Table
        from rich.text import Text

        drawn = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        columns = [
            replace(one, header=escaped(one.header), cells=tuple(map(escaped, one.cells)))
            for one in columns
        ]
        needed = sum(column.width + GAP for column in columns)
        aligned: list[Literal["left", "right"]] = [
            "right" if _is_numeric(column.cells) else "left" for column in columns
        ]
        if self.terminal and needed > self.width:
            columns = folded(columns, self.width)
        for column, side in zip(columns, aligned, strict=True):
            drawn.add_column(Text(column.head), justify=side, overflow="fold")
        for index, row in enumerate(zip(*(column.cells for column in columns), strict=True)):
            best = ["bold" if index in column.best else "" for column in columns]
            drawn.add_row(*map(Text, row, best))
        rich = Rich(
            width=self.width if self.terminal else needed,
            force_terminal=self.terminal,
            highlight=False,
        )
        with rich.capture() as written:
            if title:
                rich.print(Text(escaped(title), style="bold"), soft_wrap=True)
            rich.print(drawn)
        for line in written.get().splitlines():
            sys.stdout.write(line.rstrip() + "\n")

    def note(self, text: str) -> None:
        """Write a note to stderr: as JSON for programs, else as text unless quiet."""
        if self._machine:
            sys.stderr.write(json.dumps({"note": as_typed(text)}) + "\n")
        elif not self.quiet:
            self._meter.write(escaped(text))

    def footer(self, text: str) -> None:
        """Write a note broken into lines where words end: what nobody copies into a shell."""
        self.note(text if self._machine else self._filled(text, indent="  "))

    def _filled(self, text: str, indent: str = "") -> str:
        return textwrap.fill(
            escaped(text),
            self.width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def detail(self, text: str) -> None:
        """Write a note that only ``-v`` shows."""
        if self.verbose:
            self.note(text)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Show progress of what happens inside, as `show` is told; nothing is left open when it ends in any way."""
        if self._machine:
            meter: Meter = MachineLines(escaped)
        elif self.quiet:
            meter = Silence()
        else:
            meter = Bar(escaped) if sys.stderr.isatty() else Lines(escaped)
        before, self._meter = self._meter, meter
        try:
            with meter:
                yield
        finally:
            self._meter = before

    def show(self, report: Progress) -> None:
        """Show how far a verb is, inside of `watch`."""
        self._meter.show(report)

    def error(self, error: QuantForgeError) -> None:
        """Report a typed error: text, or an error object with ``--json``."""
        message = option_as_typed(error.message)
        if self.as_json or self._machine:
            fields = {"code": error.code, "message": message, "hint": error.hint}
            fields |= {k: v for k, v in (("file", error.file), ("tensor", error.tensor)) if v}
            fields = {key: as_typed(value) for key, value in fields.items()}
            sys.stderr.write(json.dumps({"error": fields}) + "\n")
            return
        sys.stderr.write(f"error: {escaped(message)}\n")
        if error.hint:
            sys.stderr.write(f"hint: {escaped(error.hint)}\n")


def _is_numeric(cells: Sequence[str]) -> bool:
    """Return whether a column holds figures (or a dash where there is none), which are aligned right."""
    return all(cell[:1] in "-+~0123456789" for cell in cells)


def printable(text: str) -> str:
    """Escape control, bidirectional and unpaired characters: names in hostile files must not drive a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def escaped(text: str) -> str:
    """Return a text as it is printed: `printable`, its paths as they were typed, each in one line."""
    return printable(in_one_line(as_typed(text)))


def escaped_text(text: str) -> str:
    """Escape as `printable` does, but leave tabs, spaces of all widths, and what joins letters and emoji."""
    return "".join(
        c if c in _KEPT_IN_TEXT or unicodedata.category(c) == "Zs" else printable(c) for c in text
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return path_as_typed(value) if isinstance(value, str) else value
