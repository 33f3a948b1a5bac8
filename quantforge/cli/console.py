"""Console output: data on stdout, everything else on stderr; no other module prints.

With ``--json`` stdout is exactly one JSON document; with ``--json-progress`` stderr is lines of JSON. The meters of
`quantforge.cli.progress_bar` show progress.
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

from quantforge.cli.path_arguments import (
    escape_line_breaks,
    restore_option_name,
    restore_typed_path,
    restore_typed_paths,
)
from quantforge.cli.progress_bar import BarMeter, JsonLineMeter, LineMeter, Meter, SilentMeter
from quantforge.errors import QuantForgeError
from quantforge.evaluation.columns import COLUMN_GAP, Column, wrap_cells
from quantforge.progress import Progress

_UNESCAPED = {"\t", "\u200c", "\u200d"}  # zero-width non-joiner and joiner
PIPE_WIDTH = 80  # characters in a line without a terminal
ENTRY_WIDTH = 17  # characters for the name of an entry and the gap after it


class Console:
    """Output of one command.

    ``quiet`` drops progress and notes, ``as_json`` replaces tables with a JSON document, ``verbose`` adds details, and
    ``machine`` writes progress, notes and errors as lines of JSON.
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
        self._meter: Meter = SilentMeter()

    def print_document(self, data: Mapping[str, Any]) -> None:
        """Write one JSON document to stdout, in ASCII; NaN and infinity become null."""
        sys.stdout.write(json.dumps(_to_json(data), indent=2, allow_nan=False) + "\n")
        sys.stdout.flush()

    def print_text(self, text: str = "") -> None:
        """Write text to stdout, with control characters escaped."""
        sys.stdout.write(format_for_terminal(text) + "\n")

    def flush(self) -> None:
        """Flush stdout."""
        sys.stdout.flush()

    def print_piece(self, text: str) -> None:
        """Write a piece of generated text to stdout and flush, see `escape_generated_text`."""
        sys.stdout.write(escape_generated_text(text))
        sys.stdout.flush()

    @property
    def is_terminal(self) -> bool:
        """Return whether stdout is a terminal."""
        return sys.stdout.isatty()

    @property
    def width(self) -> int:
        """Return the line width of stdout in characters: that of the terminal, ``COLUMNS``, or 80."""
        return shutil.get_terminal_size((PIPE_WIDTH, 24)).columns

    def print_wrapped(self, text: str) -> None:
        """Write a paragraph to stdout, wrapped at word boundaries."""
        self.print_text(self._wrap_text(text))

    def print_entry(self, name: str, text: str) -> None:
        """Write a named value to stdout; on a terminal it is wrapped with an indent."""
        indent = " " * ENTRY_WIDTH
        width = self.width if self.is_terminal else sys.maxsize
        self.print_text(
            textwrap.fill(
                format_for_terminal(text),
                width,
                initial_indent=f"{name:{ENTRY_WIDTH}}",
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
                replace_whitespace=False,
                drop_whitespace=True,
            )
        )

    def print_table(
        self, headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = ""
    ) -> None:
        """Write a table, given by rows, to stdout; see `print_columns`."""
        cells = [tuple(row[index] for row in rows) for index in range(len(headers))]
        self.print_columns(
            [Column(header, values) for header, values in zip(headers, cells, strict=True)], title
        )

    def print_columns(self, columns: Sequence[Column], title: str = "") -> None:
        """Write a table to stdout with the best values in bold; on a terminal wide cells are folded."""
        from rich.console import Console as Rich
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, COLUMN_GAP, 0, 0), header_style="bold")
        columns = [
            replace(
                table_column,
                header=format_for_terminal(table_column.header),
                cells=tuple(map(format_for_terminal, table_column.cells)),
            )
            for table_column in columns
        ]
        table_width = sum(column.width + COLUMN_GAP for column in columns)
        aligned: list[Literal["left", "right"]] = [
            "right" if _is_numeric(column.cells) else "left" for column in columns
        ]
        if self.is_terminal and table_width > self.width:
            columns = wrap_cells(columns, self.width)
        for column, alignment in zip(columns, aligned, strict=True):
            table.add_column(Text(column.wrapped_header), justify=alignment, overflow="fold")
        for index, row in enumerate(zip(*(column.cells for column in columns), strict=True)):
            styles = ["bold" if index in column.best else "" for column in columns]
            table.add_row(*map(Text, row, styles))
        rich = Rich(
            width=self.width if self.is_terminal else table_width,
            force_terminal=self.is_terminal,
            highlight=False,
        )
        with rich.capture() as capture:
            if title:
                rich.print(Text(format_for_terminal(title), style="bold"), soft_wrap=True)
            rich.print(table)
        for line in capture.get().splitlines():
            sys.stdout.write(line.rstrip() + "\n")

    def note(self, text: str) -> None:
        """Write a note to stderr: as JSON for programs, else as text unless quiet."""
        if self._machine:
            sys.stderr.write(json.dumps({"note": restore_typed_paths(text)}) + "\n")
        elif not self.quiet:
            self._meter.write(format_for_terminal(text))

    def print_footer(self, text: str) -> None:
        """Write a note wrapped at word boundaries, for text that nobody copies into a shell."""
        self.note(text if self._machine else self._wrap_text(text, indent="  "))

    def _wrap_text(self, text: str, indent: str = "") -> str:
        return textwrap.fill(
            format_for_terminal(text),
            self.width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def print_detail(self, text: str) -> None:
        """Write a note that is shown only with ``-v``."""
        if self.verbose:
            self.note(text)

    @contextmanager
    def progress_meter(self) -> Iterator[None]:
        """Show a progress meter while the body runs; it is closed in any case."""
        if self._machine:
            meter: Meter = JsonLineMeter(format_for_terminal)
        elif self.quiet:
            meter = SilentMeter()
        else:
            meter = (
                BarMeter(format_for_terminal)
                if sys.stderr.isatty()
                else LineMeter(format_for_terminal)
            )
        previous, self._meter = self._meter, meter
        try:
            with meter:
                yield
        finally:
            self._meter = previous

    def show_progress(self, report: Progress) -> None:
        """Show a progress report, inside of `progress_meter`."""
        self._meter.show(report)

    def print_error(self, error: QuantForgeError) -> None:
        """Report a typed error: text, or an error object with ``--json``."""
        message = restore_option_name(error.message)
        if self.as_json or self._machine:
            fields = {"code": error.code, "message": message, "hint": error.hint}
            fields |= {k: v for k, v in (("file", error.file), ("tensor", error.tensor)) if v}
            fields = {key: restore_typed_paths(value) for key, value in fields.items()}
            sys.stderr.write(json.dumps({"error": fields}) + "\n")
            return
        sys.stderr.write(f"error: {format_for_terminal(message)}\n")
        if error.hint:
            sys.stderr.write(f"hint: {format_for_terminal(error.hint)}\n")


def _is_numeric(cells: Sequence[str]) -> bool:
    """Return whether a column has only numbers or dashes, which are aligned right."""
    return all(cell[:1] in "-+~0123456789" for cell in cells)


def escape_control_characters(text: str) -> str:
    """Escape control, bidirectional and surrogate characters, so that names in files cannot control a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def format_for_terminal(text: str) -> str:
    """Return a text as it is printed: paths as they were typed, control characters escaped."""
    return escape_control_characters(escape_line_breaks(restore_typed_paths(text)))


def escape_generated_text(text: str) -> str:
    """Escape control characters except tabs, Unicode spaces and joiners of letters and emoji."""
    return "".join(
        c if c in _UNESCAPED or unicodedata.category(c) == "Zs" else escape_control_characters(c)
        for c in text
    )


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return restore_typed_path(value) if isinstance(value, str) else value
