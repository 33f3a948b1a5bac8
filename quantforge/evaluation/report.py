"""A finished evaluation as a file: Markdown, the document of ``--json``, or one page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.evaluation.columns import Column
from quantforge.evaluation.report_page.page import page
from quantforge.evaluation.text_tables import ON_FRONT, notes, tables, titles
from quantforge.evaluation.verdict import short_names

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation


def render(evaluation: Evaluation, kind: str) -> str:
    """Return the report as ``markdown``, ``html`` or ``json``, with `short_names` in place of paths: others read it."""
    names = short_names([str(row["path"]) for row in evaluation.rows])
    rows = tuple({**row, "path": name} for row, name in zip(evaluation.rows, names, strict=True))
    return _KINDS[kind](replace(evaluation, rows=rows))


def markdown(evaluation: Evaluation) -> str:
    """Return the tables as Markdown, with the verdict and the protocol; best values are bold."""
    verdict, drawn = evaluation.verdict, tables(evaluation, None)
    parts = [_markdown_table(columns) for _, columns in drawn]
    front = f"`{ON_FRONT}`: no other is as small and closer (Pareto front)"
    parts.append(_listed([*verdict.sentences, *([front] if verdict.front else [])]))
    parts.append(_listed(notes(evaluation, titles(drawn))))
    return "\n".join(part for part in parts if part)


def _markdown_table(columns: Sequence[Column]) -> str:
    def cell(column: Column, index: int) -> str:
        text = _escape(column.cells[index])
        return f"**{text}**" if index in column.best else text

    lines: list[Sequence[str]] = [[column.header for column in columns], ["---:"] * len(columns)]
    count = len(columns[0].cells)
    lines += [[cell(column, index) for column in columns] for index in range(count)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _listed(lines: Sequence[str]) -> str:
    return "".join(f"* {line}\n" for line in lines)


def json_document(evaluation: Evaluation) -> str:
    """Return the document of ``--json``."""
    return json.dumps(evaluation.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("*", "\\*")


_KINDS: Mapping[str, Callable[[Evaluation], str]] = {
    "markdown": markdown,
    "html": page,
    "json": json_document,
}
