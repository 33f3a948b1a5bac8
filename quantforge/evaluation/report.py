"""A finished evaluation as a table, as Markdown, and as one HTML page that needs nothing else.

The table is plain text in rows, so that the command line may draw it as it likes. The page holds a
scatter of KL divergence (logarithmic) against size as inline SVG, follows the light or dark setting
of its reader, and has no script and no external resource. The protocol stands under every table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from quantforge.evaluation.evaluate import Evaluation
from quantforge.evaluation.harness import TASK_ERROR
from quantforge.evaluation.scatter import scatter

Row = Mapping[str, Any]
ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """Headers, and rows of as many cells."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def render(evaluation: Evaluation, kind: str) -> str:
    """Return the report as ``markdown``, ``html`` or ``json``: for others, so that no path stands in it."""
    names = _names([str(row["path"]) for row in evaluation.rows])
    rows = tuple({**row, "path": name} for row, name in zip(evaluation.rows, names, strict=True))
    return _KINDS[kind](replace(evaluation, rows=rows))


def table(evaluation: Evaluation) -> Table:
    """Return the comparison as text; columns without any figure are left out."""
    names = _names([str(row["path"]) for row in evaluation.rows])
    columns = (*_COLUMNS, *_task_columns(evaluation.rows))
    cells = [
        [name, *(write(row) for _, write in columns)]
        for name, row in zip(names, evaluation.rows, strict=True)
    ]
    headers = ["model", *(header for header, _ in columns)]
    kept = [i for i in range(len(headers)) if any(row[i] != ABSENT for row in cells)]
    rows = tuple(tuple(row[i] for i in kept) for row in cells)
    return Table(tuple(headers[i] for i in kept), rows)


def notes(evaluation: Evaluation) -> tuple[str, ...]:
    """Return the notes under the table: the protocol and the meaning of the figures."""
    protocol = evaluation.protocol
    found = [
        f"protocol: {protocol}; token ids sha256 {protocol.tokens_sha256[:16]}",
        "KL: exact, reference against model, whole vocabulary, nats per token; "
        "± is one standard error over windows, of differences paired by window",
    ]
    if protocol.speed_dtype:
        found.append(
            f"speed and peak memory: one sequence, {protocol.speed_dtype}, "
            f"{protocol.threads} thread(s), by the decoder that is named; own and transformers' "
            "do not compare; bandwidth: share of the measured read bandwidth"
        )
    return tuple(found)


def markdown(evaluation: Evaluation) -> str:
    """Return the comparison as a Markdown table with its protocol."""
    found = table(evaluation)
    lines = [found.headers, ("---", *("---:" for _ in found.headers[1:])), *found.rows]
    body = "\n".join("| " + " | ".join(_escape(cell) for cell in line) + " |" for line in lines)
    below = "\n".join(f"* {note}" for note in notes(evaluation))
    return f"{body}\n\n{below}\n"


def json_document(evaluation: Evaluation) -> str:
    """Return the document of ``--json``."""
    return json.dumps(evaluation.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def html(evaluation: Evaluation, title: str = "Evaluation") -> str:
    """Return the comparison as a self-contained page."""
    found = table(evaluation)
    head = "".join(f"<th>{escape(header)}</th>" for header in found.headers)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n"
        for row in found.rows
    )
    names = _names([str(row["path"]) for row in evaluation.rows])
    below = "".join(f"<li>{escape(note)}</li>\n" for note in notes(evaluation))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{scatter(names, evaluation.rows)}"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>'
        f"</div>\n<ul>{below}</ul></body></html>\n"
    )


def _names(paths: list[str]) -> list[str]:
    """Return the last part of each path, or as many parts as tell them apart; never where all of them lie."""
    parts = [Path(path).absolute().parts[1:] for path in paths]
    different = len(set(parts))
    for count in range(1, max(map(len, parts), default=0) + 1):
        short = ["/".join(part[-count:]) for part in parts]
        if len(set(short)) == different:
            return short
    return paths


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|")


def _figure(key: str, form: str, scale: float = 1.0, error: str = "") -> Callable[[Row], str]:
    """Write one figure, with its standard error where there is one."""

    def write(row: Row) -> str:
        if row[key] is None:
            return ABSENT
        text = format(row[key] * scale, form)
        known = error and row[error] is not None
        return f"{text} ± {format(row[error] * scale, form.lstrip('+'))}" if known else text

    return write


def _size(key: str) -> Callable[[Row], str]:
    def write(row: Row) -> str:
        if row[key] is None:
            return ABSENT
        value, unit = row[key] / 1e6, "MB"
        if value < 1:
            return f"{row[key] / 1e3:.1f} kB"
        if value >= 1000:
            value, unit = value / 1000, "GB"
        return f"{value:.1f} {unit}"

    return write


def _task_columns(rows: Sequence[Row]) -> list[tuple[str, Callable[[Row], str]]]:
    """Return one column per task and metric; standard errors stand beside their figure."""
    asked = dict.fromkeys(
        (task, metric)
        for row in rows
        for task, figures in (row["tasks"] or {}).items()
        for metric in figures
        if not metric.endswith(TASK_ERROR)
    )
    return [(f"{task} {metric}", partial(_task_figure, task, metric)) for task, metric in asked]


def _task_figure(task: str, metric: str, row: Row) -> str:
    figures = (row["tasks"] or {}).get(task, {})
    if metric not in figures:
        return ABSENT
    error = figures.get(metric + TASK_ERROR)
    return f"{figures[metric]:.4g}" + ("" if error is None else f" ± {error:.2g}")


def _kernels(row: Row) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in row["kernels"].items())


def _batches(row: Row) -> str:
    """Return tokens per second of all sequences together."""
    found = row["decode_by_batch"]
    return ABSENT if found is None else ", ".join(f"{found[batch]:.1f}" for batch in ("4", "16"))


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("format", lambda row: str(row["format"])),
    ("scheme", lambda row: str(row["scheme"])),
    ("bits/weight", _figure("bits_per_weight", ".2f")),
    ("size", _size("weight_bytes")),
    ("perplexity", _figure("perplexity", ".3f", error="perplexity_se")),
    ("increase %", _figure("perplexity_increase", "+.2f", 100, "perplexity_increase_se")),
    ("KL", _figure("kl_mean", ".5f", error="kl_se")),
    ("KL p99", _figure("kl_p99", ".4f")),
    ("top-1 %", _figure("top1_agreement", ".2f", 100)),
    ("ppl in llama.cpp", _figure("llama_cpp_perplexity", ".3f")),
    ("peak memory", _size("peak_bytes")),
    ("prefill tok/s", _figure("prefill_tokens_per_second", ".1f")),
    ("decode tok/s", _figure("decode_tokens_per_second", ".1f")),
    ("batch 4, 16", _batches),
    ("bandwidth %", _figure("bandwidth_use", ".0f", 100)),
    ("KV/token", _size("kv_bytes_per_token")),
    ("decoder", lambda row: row["decoder"] or ABSENT),
    ("kernels", _kernels),
)

_KINDS: Mapping[str, Callable[[Evaluation], str]] = {
    "markdown": markdown,
    "html": html,
    "json": json_document,
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --line: #d0d7de;
 --point: #0a5cc2; }
@media (prefers-color-scheme: dark) {
 :root { --ink: #e6edf3; --paper: #0d1117; --line: #3d444d; --point: #6cb0ff; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
 max-width: 110rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: right;
 white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 44rem; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg line { stroke: var(--line); }
svg circle { fill: var(--point); }
"""
