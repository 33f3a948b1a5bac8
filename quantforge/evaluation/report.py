"""Reports of an evaluation: Markdown, the JSON document of ``--json``, or a self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.evaluation.columns import Column
from quantforge.evaluation.report_page.page import page
from quantforge.evaluation.text_tables import PARETO_MARK, build_tables, column_headers, notes
from quantforge.evaluation.verdict import short_names

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation


def render(evaluation: Evaluation, report_format: str) -> str:
    """Render the report of an evaluation, with short model names instead of local paths.

    Args:
        evaluation: the evaluation.
        report_format: ``markdown``, ``html`` or ``json``.
    """
    names = short_names([str(row["path"]) for row in evaluation.rows])
    rows = tuple({**row, "path": name} for row, name in zip(evaluation.rows, names, strict=True))
    return _RENDERERS[report_format](replace(evaluation, rows=rows))


def markdown(evaluation: Evaluation) -> str:
    """Render the tables, the verdict and the protocol as Markdown, with the best values in bold."""
    verdict, shown_tables = evaluation.verdict, build_tables(evaluation, None)
    sections = [_markdown_table(columns) for _, columns in shown_tables]
    legend = f"`{PARETO_MARK}`: no other is as small and closer (Pareto front)"
    sections.append(_bullet_list([*verdict.sentences, *([legend] if verdict.pareto_front else [])]))
    sections.append(_bullet_list(notes(evaluation, column_headers(shown_tables))))
    return "\n".join(section for section in sections if section)


def _markdown_table(columns: Sequence[Column]) -> str:
    """Render columns as a Markdown table."""

    def cell(column: Column, index: int) -> str:
        text = _escape(column.cells[index])
        return f"**{text}**" if index in column.best else text

    lines: list[Sequence[str]] = [[column.header for column in columns], ["---:"] * len(columns)]
    count = len(columns[0].cells)
    lines += [[cell(column, index) for column in columns] for index in range(count)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _bullet_list(lines: Sequence[str]) -> str:
    """Render lines as a Markdown list."""
    return "".join(f"* {line}\n" for line in lines)


def json_document(evaluation: Evaluation) -> str:
    """Render the JSON document of ``--json``."""
    return json.dumps(evaluation.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _escape(cell: str) -> str:
    """Escape the characters of a cell that have a meaning in Markdown tables."""
    return cell.replace("|", "\\|").replace("*", "\\*")


_RENDERERS: Mapping[str, Callable[[Evaluation], str]] = {
    "markdown": markdown,
    "html": page,
    "json": json_document,
}
