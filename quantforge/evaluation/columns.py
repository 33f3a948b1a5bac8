"""Columns of a table of text, and as many of them as a width holds.

Columns stand in the order of reading, and have a rank: what a width does not hold is left out from the highest rank
down. Those for experts come when they are asked for. What is still too wide is broken into lines where words, or parts
of a name, end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

ABSENT = "-"
EXPERT = 99  # the rank of columns that only experts read
GAP = 2  # between columns
FOLDED = 32  # characters of a column that always stays; a terminal folds what is longer
NAMED = 8  # columns that are left out, the most important first
_PIECE = re.compile(r"[^\s.:/,|]*[\s.:/,|]+|[^\s.:/,|]+")  # a word with what ends it


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        header: its title.
        cells: one for each row.
        rank: what has the highest is left out first; 0 always stays.
        best: indices of the rows whose value is the best.
        broken: characters of a line of the title, if it is drawn in several; 0 is one line.
    """

    header: str
    cells: tuple[str, ...]
    rank: int = 0
    best: frozenset[int] = frozenset()
    broken: int = 0

    @property
    def head(self) -> str:
        """Return the title as it is drawn, with line breaks."""
        return _lines(self.header, self.broken) if self.broken else self.header

    @property
    def width(self) -> int:
        """Return the characters of its widest cell, or line of its title."""
        return max(map(len, (*self.head.split("\n"), *self.cells)))


def fitting(columns: Sequence[Column], width: int | None, *, wide: bool = False) -> list[Column]:
    """Return the columns that a width holds, in their order.

    Args:
        columns: all of them; what has no figure at all is left out.
        width: characters of a line; None is without limit.
        wide: take the columns for experts too, and ignore the width.
    """
    filled = [column for column in columns if {*column.cells} - {ABSENT, ""}]
    if wide:
        return filled
    chosen: list[Column] = []
    taken = -GAP
    for column in sorted((one for one in filled if one.rank < EXPERT), key=lambda one: one.rank):
        taken += GAP + (column.width if column.rank else min(column.width, FOLDED))
        if width is not None and taken > width and column.rank:
            break
        chosen.append(column)
    return [column for column in filled if column in chosen]


def left_out(everything: Sequence[Column], drawn: Sequence[Column]) -> str:
    """Return a line on what a table lacks for want of width, or else for experts only; empty where nothing is."""
    headers = {column.header for column in drawn}
    missing = [one for one in fitting(everything, None, wide=True) if one.header not in headers]
    cut = sorted((one for one in missing if one.rank < EXPERT), key=lambda one: one.rank)
    named = [one.header for one in cut or missing]
    more = len(named) - NAMED
    names = ", ".join([*named[:NAMED], f"and {more} more"] if more > 1 else named)
    if not names:
        return ""
    return f"left out, too wide: {names} (--wide)" if cut else f"with --wide also: {names}"


def folded(columns: Sequence[Column], width: int) -> list[Column]:
    """Return columns whose cells have line breaks, so that a row takes ``width`` characters.

    The widest column gives way first. No word is broken: a word that is longer than its column may be stays longer.
    """
    widths = [column.width for column in columns]
    least = [
        max(len(piece.rstrip()) for text in (one.header, *one.cells) for piece in _pieces(text))
        for one in columns
    ]
    over = sum(widths) + GAP * (len(widths) - 1) - width
    for _ in range(over):
        place = max(range(len(widths)), key=lambda at: (widths[at] > least[at], widths[at]))
        if widths[place] <= least[place]:
            break
        widths[place] -= 1
    return [
        replace(
            one,
            header=_lines(one.header, most),
            cells=tuple(_lines(cell, most) for cell in one.cells),
            broken=0,
        )
        for one, most in zip(columns, widths, strict=True)
    ]


def _pieces(text: str) -> list[str]:
    return _PIECE.findall(text) or [""]


def _lines(text: str, width: int) -> str:
    """Return a text with line breaks between its pieces, in lines of ``width`` characters."""
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)
