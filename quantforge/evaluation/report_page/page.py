"""The page of an evaluation, put together from its sections; a section without figures is left out.

Beside the charts it has tables that can be sorted, answers side by side, and the commands that make it all again.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from quantforge.artifacts.number_text import UNITS, significant
from quantforge.evaluation.block_errors import DEFINITION
from quantforge.evaluation.columns import ABSENT, Column, fitting
from quantforge.evaluation.report_page.charts import (
    Chart,
    front_chart,
    heat,
    quantiles,
    series,
    with_errors,
)
from quantforge.evaluation.tasks import TASK_ERROR, YAML
from quantforge.evaluation.text_tables import (
    cache_tables,
    metrics_of,
    notes,
    quality_columns,
    speed_columns,
    tables,
    titles,
)
from quantforge.evaluation.verdict import MARK, Verdict

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation
    from quantforge.evaluation.options import EvaluationOptions

Part = tuple[str, bool]  # text, and whether it differs
Row = Mapping[str, Any]
SHORT = 20  # letters of a cell that stays on one line
SHOWN_PROMPTS = 8  # of long lists the first; the document has all
BUILTIN_TEXT, BUILTIN_PROMPTS = "builtin evaluation text", "builtin prompts"
_SCALES = {unit: 1000.0**power for power, unit in enumerate(UNITS)} | {"ms": 1e-3, "s": 1.0}
QUANTILES_NOTE = (
    "Of the tokens that were scored: the bar holds the middle half, its gap the median, the line 5 to 95 %; "
    "the marks are 99 % and 99.9 %."
)


@dataclass(frozen=True, slots=True)
class ReportCell:
    """Text of a cell, the number by which it is sorted (or the text), and whether it is the best."""

    text: str
    key: str
    best: bool


@dataclass(frozen=True, slots=True)
class SortableTable:
    """A table of the page; the first column names the row."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[ReportCell, ...], ...]


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """Answer of one model to a prompt, its words marked where the reference has others."""

    model: str
    about: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """How a model was made: the commands, and the recipe that they read."""

    model: str
    commands: tuple[str, ...]
    file: str
    recipe: str


def page(evaluation: Evaluation) -> str:
    """Return the page of an evaluation, whose rows are named without paths."""
    rows, verdict = evaluation.rows, evaluation.verdict
    prompts, count = evaluation.options.prompts, len(rows) - 1
    compared = "1 model compared" if count == 1 else f"{count} models compared"
    return _rendered(
        title=f"{verdict.names[0]}: {compared}",
        date=evaluation.date,
        versions=evaluation.versions,
        verdict=verdict,
        notes=notes(evaluation, titles(tables(evaluation, None, wide=True))),
        sections=[(title, charts) for title, charts in _sections(rows, verdict) if charts],
        tables=_tables(evaluation),
        detail_tables=[*_detail_tables(rows, verdict)],
        prompts=None if prompts is None else prompts.to_json(),
        answers=[] if prompts is None else answers(prompts.texts, verdict.names, rows),
        command=evaluation_command(evaluation, verdict.names),
        origins=[*origins(rows, verdict)],
        events=[
            (name, row["events"])
            for name, row in zip(verdict.names, rows, strict=True)
            if row["events"]
        ],
    )


def _tables(evaluation: Evaluation) -> list[Any]:
    rows, verdict = evaluation.rows, evaluation.verdict
    found = [sortable("Quality and size", quality_columns(rows, verdict))]
    if evaluation.protocol.speed_dtype:
        found.append(sortable("Speed and memory", speed_columns(rows, verdict)))
    return found + [sortable(*table) for table in cache_tables(rows, verdict.names)]


def _detail_tables(rows: Sequence[Any], verdict: Verdict) -> Iterator[Any]:
    """Yield the figures of charts that no other table has."""
    named = [*zip(verdict.names, rows, strict=True)]
    shares = {
        name: {f"{100 * float(share):.4g} %": value for share, value in row["kl_quantiles"].items()}
        for name, row in named
        if row["kl_quantiles"]
    }
    if shares:
        yield plain_table("Quantiles of the KL divergence of a token", shares)
    blocks = {
        name: {f"block {index}": value for index, value in enumerate(row["block_errors"])}
        for name, row in named
        if row["block_errors"]
    }
    if blocks:
        yield plain_table("Error of each block", blocks)


def _sections(rows: Sequence[Any], verdict: Verdict) -> Iterator[tuple[str, list[Chart]]]:
    """Yield the sections of charts with their titles, in the order of the page."""
    named = [*zip(verdict.names, rows, strict=True)]
    front = front_chart(rows, verdict)
    quality = [] if front is None else [front]
    yield "Size and quality", [*quality, *_quality_charts(named), *_perplexity_charts(named)]
    yield "Speed and memory", [*_speed_charts(named)]
    yield "Tasks", [*_task_charts(rows, named)]


def _quality_charts(named: Sequence[tuple[str, Any]]) -> Iterator[Chart]:
    # A model that does not differ at all has no place on a logarithmic axis.
    shares = {
        name: row["kl_quantiles"]
        for name, row in named
        if row["kl_quantiles"] and row["kl_quantiles"]["0.999"] > 0
    }
    if shares:
        yield quantiles("KL divergence of a token (nats)", QUANTILES_NOTE, shares)
    blocks = {name: row["block_errors"] for name, row in named if row["block_errors"]}
    if any(any(found) for found in blocks.values()):
        note = f"{DEFINITION}. Errors of earlier blocks do not count."
        yield heat("Relative error of each block", note, blocks)


def _perplexity_charts(named: Sequence[tuple[str, Any]]) -> Iterator[Chart]:
    figures = [(name, row["perplexity"], row["perplexity_se"]) for name, row in named]
    note = "Lines: one standard error over windows. All models read the same windows: differences are far more certain."
    yield with_errors("Perplexity", note, figures)
    rises = [
        (name, 100 * row["perplexity_increase"], 100 * (row["perplexity_increase_se"] or 0))
        for name, row in named
        if row["perplexity_increase"] is not None
    ]
    if rises:
        note = "Against the reference, differences paired by window; lines: one standard error."
        yield with_errors("Rise of perplexity (%)", note, rises)


def _speed_charts(named: Sequence[tuple[str, Any]]) -> Iterator[Chart]:
    first = {
        name: {tokens: 1000 * value for tokens, value in row["ttft_by_prompt"].items()}
        for name, row in named
        if row["ttft_by_prompt"]
    }
    if first:
        note = "Less is better: how long a prompt of so many tokens takes until its first token is there."
        yield series("Time to the first token (ms)", note, "tokens of the prompt", first)
    paces = {name: row["decode_by_batch"] for name, row in named if row["decode_by_batch"]}
    if paces:
        note = "More is better: of all sequences that are decoded together."
        yield series("Tokens per second", note, "sequences at once", paces)
    memory = {
        name: {"weights in memory": row["held_bytes"] / 1e6, "peak": row["peak_bytes"] / 1e6}
        for name, row in named
        if row["peak_bytes"]
    }
    if memory:
        note = "Less is better: what the weights take, and the most that the process took above what it began with."
        yield series("Memory (MB)", note, "memory", memory)


def _task_charts(rows: Sequence[Row], named: Sequence[tuple[str, Any]]) -> Iterator[Chart]:
    for task, metric in metrics_of(rows):
        found = [(name, (row["tasks"] or {}).get(task, {})) for name, row in named]
        figures = [
            (name, figures[metric], figures.get(metric + TASK_ERROR))
            for name, figures in found
            if metric in figures
        ]
        yield with_errors(f"{task}: {metric}", "Lines: one standard error.", figures)


def sortable(caption: str, columns: Sequence[Column]) -> SortableTable:
    """Return the columns that have a figure as a table of the page; best values keep their mark."""
    kept = [column for column in fitting(columns, None) if column.header]
    rows = tuple(
        tuple(
            ReportCell(_unbroken(text := column.cells[row]), sort_key(text), row in column.best)
            for column in kept
        )
        for row in range(len(kept[0].cells))
    )
    return SortableTable(caption, tuple(column.header for column in kept), rows)


def _unbroken(text: str) -> str:
    """Return a cell whose spaces do not break, if it is short."""
    return text.replace(" ", "\N{NO-BREAK SPACE}") if len(text) <= SHORT else text


def plain_table(caption: str, names: Mapping[str, Mapping[str, float | None]]) -> SortableTable:
    """Return figures by model and name as a table; a dash where there is none."""
    headers = list(dict.fromkeys(key for found in names.values() for key in found))
    rows = tuple(
        (ReportCell(name, name, False), *(_figure(found.get(key)) for key in headers))
        for name, found in names.items()
    )
    return SortableTable(caption, ("model", *headers), rows)


def _figure(value: float | None) -> ReportCell:
    if value is None:
        return ReportCell(ABSENT, "", False)
    return ReportCell(significant(value), str(value), False)


def sort_key(text: str) -> str:
    """Return the number that a cell begins with, in the unit without a prefix; the text where it begins with none."""
    words = text.removeprefix(MARK).replace(",", " ").split()
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        return "" if text == ABSENT else text
    return str(value * _SCALES.get(words[1] if len(words) > 1 else "", 1.0))


def answers(
    prompts: Sequence[str], names: Sequence[str], rows: Sequence[Row]
) -> list[tuple[str, list[ShownAnswer]]]:
    """Return the prompts, each with the answer of every model, the reference first."""
    found = [row["generated"]["answers"] for row in rows]
    return [
        (
            prompt,
            [
                _shown(name, given[place], found[0][place])
                for name, given in zip(names, found, strict=True)
            ],
        )
        for place, prompt in enumerate(prompts[:SHOWN_PROMPTS])
    ]


def _shown(name: str, answer: Row, reference: Row) -> ShownAnswer:
    about = f"{answer['tokens']} tokens" + ("" if answer["ended"] else ", cut there")
    if "parts_at" in answer:
        place = answer["parts_at"]
        about += ", the same as the reference's" if place is None else f", parts after {place}"
        about += f"; KL {significant(answer['kl_mean'])}"
    return ShownAnswer(
        name, about, tuple(marked(answer["text"].strip("\n"), reference["text"].strip("\n")))
    )


def evaluation_command(evaluation: Evaluation, names: Sequence[str]) -> str:
    """Return the command that makes this evaluation again: every option that a figure depends on.

    Files and directories are named, and have to be there.
    """
    protocol, options = evaluation.protocol, evaluation.options
    words = ["quantforge", "eval", *names]
    if protocol.text != BUILTIN_TEXT and not options.text_found:
        words += ["--text", _file(protocol.text)]
    words += ["--windows", str(protocol.windows), "--length", str(protocol.length)]
    if (prompts := options.prompts) is not None:
        name = prompts.name
        words += ["--generated", "builtin" if name == BUILTIN_PROMPTS else _file(name)]
        words += ["--generated-tokens", str(prompts.new_tokens)]
        words += ["--chat-template"] if prompts.chat_template else []
    words += _measured_too(options)
    words += ["--adapter", _file(protocol.adapter)] if protocol.adapter else []
    words += ["--correction", _file(protocol.correction)] if protocol.correction else []
    words += [] if protocol.speed_dtype else ["--no-speed"]
    words += [] if protocol.input_bits == 16 else ["--input-bits", str(protocol.input_bits)]
    if protocol.device != "cpu":
        words += ["--device", protocol.device]
    elif protocol.speed_dtype:
        words += ["--threads", str(protocol.threads)]
    return shlex.join([*words, "--report", "report.html"])


def _measured_too(options: EvaluationOptions) -> Iterator[str]:
    """Yield the options that the protocol does not state."""
    if options.tasks is not None:
        tasks = options.tasks
        names = [Path(name).name if name.endswith(YAML) else name for name in tasks.names]
        yield from ("--tasks", ",".join(names))
        yield from ("--task-limit", str(tasks.limit)) if tasks.limit else ()
        yield from ("--allow-code",) if tasks.code else ()
    if options.caches:
        yield from ("--cache", ",".join(options.caches))
    if options.engine:
        yield from ("--engine", options.engine)


def origins(rows: Iterable[Row], verdict: Verdict) -> Iterator[Origin]:
    """Yield how each model was made that says so."""
    for name, row in zip(verdict.names, rows, strict=True):
        made = row.get("made_by")
        if not made or not made["source"] or not made["recipe"]:
            continue
        stem = name.replace("/", "-")
        file, step = f"{stem}.toml", f"{stem}-source" if made["exported"] else name
        commands = [
            shlex.join(["quantforge", "quantize", made["source"], "--recipe", file, "-o", step])
        ]
        if made["exported"]:
            commands.append(
                shlex.join(["quantforge", "export", step, "--format", row["format"], "-o", name])
            )
        yield Origin(name, tuple(commands), file, made["recipe"])


def _file(name: str) -> str:
    """Return a cited source without its digest."""
    return name.partition(" (SHA-256")[0]


def marked(text: str, reference: str) -> list[Part]:
    """Cut a text into parts that it shares with a reference, in order, and parts that differ."""
    words, others = (re.findall(r"\s+|[^\s]+", item) for item in (text, reference))
    found: list[Part] = []
    matcher = SequenceMatcher(None, words, others, autojunk=False)
    for kind, first, last, _, _ in matcher.get_opcodes():
        part = "".join(words[first:last])
        if part:
            found.append((part, kind != "equal" and not part.isspace()))
    return found


def _rendered(**values: Any) -> str:
    """Return the page; whatever is foreign (names, texts, recipes) is escaped, what is drawn is ours."""
    loader = PackageLoader("quantforge.evaluation", "report_page")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    style, script = (loader.get_source(environment, name)[0] for name in ("page.css", "sort.js"))
    return environment.get_template("page.html.jinja").render(
        style=style,
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )
