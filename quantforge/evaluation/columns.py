"""Columns of text tables, and the selection of those that fit into a given width.

Columns are in reading order and have a rank: if the width does not suffice, columns are omitted from the highest rank
down. Columns for experts are shown only on request. What is still too wide is wrapped at the ends of words or of the
parts of a name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

ABSENT = "-"
EXPERT_RANK = 99  # rank of columns for experts, shown on request
COLUMN_GAP = 2  # between columns
MAX_FIXED_WIDTH = 32  # width counted for a column of rank 0; longer cells are wrapped
MAX_NAMED_COLUMNS = 8  # omitted columns to list, the most important first
_PIECE = re.compile(r"[^\s.:/,|]*[\s.:/,|]+|[^\s.:/,|]+")  # a word with its separators


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a text table.

    Attributes:
        header: title of the column.
        cells: text of each row.
        rank: priority; the columns with the highest rank are omitted first, those of rank 0 never.
        best: indices of the rows with the best value.
        header_width: characters per line of a wrapped header; 0 writes it in one line.
    """

    header: str
    cells: tuple[str, ...]
    rank: int = 0
    best: frozenset[int] = frozenset()
    header_width: int = 0

    @property
    def wrapped_header(self) -> str:
        """Return the header with line breaks."""
        return _lines(self.header, self.header_width) if self.header_width else self.header

    @property
    def width(self) -> int:
        """Return the width of the widest cell or header line in characters."""
        return max(map(len, (*self.wrapped_header.split("\n"), *self.cells)))


def select_columns(
    columns: Sequence[Column], width: int | None, *, wide: bool = False
) -> list[Column]:
    """Return the columns that fit into a width, in reading order.

    Args:
        columns: all columns; those without any value are omitted.
        width: characters per line; None for no limit.
        wide: include the columns for experts and ignore the width.
    """
    filled = [column for column in columns if {*column.cells} - {ABSENT, ""}]
    if wide:
        return filled
    selected: list[Column] = []
    used_width = -COLUMN_GAP
    for column in sorted(
        (column for column in filled if column.rank < EXPERT_RANK), key=lambda column: column.rank
    ):
        used_width += COLUMN_GAP + (
            column.width if column.rank else min(column.width, MAX_FIXED_WIDTH)
        )
        if width is not None and used_width > width and column.rank:
            break
        selected.append(column)
    return [column for column in filled if column in selected]


def describe_omitted(all_columns: Sequence[Column], shown_columns: Sequence[Column]) -> str:
    """Return a line that lists the columns omitted for lack of width, or else those for experts; "" if none."""
    shown_headers = {column.header for column in shown_columns}
    omitted = [
        column
        for column in select_columns(all_columns, None, wide=True)
        if column.header not in shown_headers
    ]
    too_wide = sorted(
        (column for column in omitted if column.rank < EXPERT_RANK), key=lambda column: column.rank
    )
    headers = [column.header for column in too_wide or omitted]
    unnamed = len(headers) - MAX_NAMED_COLUMNS
    names = ", ".join(
        [*headers[:MAX_NAMED_COLUMNS], f"and {unnamed} more"] if unnamed > 1 else headers
    )
    if not names:
        return ""
    return f"left out, too wide: {names} (--wide)" if too_wide else f"with --wide also: {names}"


def wrap_cells(columns: Sequence[Column], width: int) -> list[Column]:
    """Wrap the cells of a table so that a row takes ``width`` characters, narrowing the widest columns first.

    Words are never split: a word longer than its column stays whole.
    """
    widths = [column.width for column in columns]
    min_widths = [
        max(
            len(piece.rstrip())
            for text in (column.header, *column.cells)
            for piece in _pieces(text)
        )
        for column in columns
    ]
    excess_width = sum(widths) + COLUMN_GAP * (len(widths) - 1) - width
    for _ in range(excess_width):
        widest = max(
            range(len(widths)), key=lambda index: (widths[index] > min_widths[index], widths[index])
        )
        if widths[widest] <= min_widths[widest]:
            break
        widths[widest] -= 1
    return [
        replace(
            column,
            header=_lines(column.header, max_width),
            cells=tuple(_lines(cell, max_width) for cell in column.cells),
            header_width=0,
        )
        for column, max_width in zip(columns, widths, strict=True)
    ]


def _pieces(text: str) -> list[str]:
    """Split a text at the places where a line may be broken."""
    return _PIECE.findall(text) or [""]


def _lines(text: str, width: int) -> str:
    """Insert line breaks between the pieces of a text, so that lines have at most ``width`` characters."""
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)
