"""The HTML report of an evaluation, rendered from its sections; sections without data are omitted.

Besides charts it has sortable tables, the models' answers side by side, and the commands that reproduce it.
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
from quantforge.evaluation.columns import ABSENT, Column, select_columns
from quantforge.evaluation.report_page.charts import (
    Chart,
    error_bar_chart,
    front_chart,
    heat_map,
    quantile_chart,
    series_chart,
)
from quantforge.evaluation.tasks import STDERR_SUFFIX, YAML_SUFFIXES
from quantforge.evaluation.text_tables import (
    build_tables,
    cache_tables,
    column_headers,
    notes,
    quality_columns,
    speed_columns,
    task_metrics,
)
from quantforge.evaluation.verdict import UNRELIABLE_MARK, Verdict

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation
    from quantforge.evaluation.measurement_options import EvaluationOptions

TextPart = tuple[str, bool]  # text, and whether it differs from the reference
Row = Mapping[str, Any]
MAX_UNBROKEN_LETTERS = 20  # longest cell that is kept on one line
MAX_SHOWN_PROMPTS = 8  # the JSON document has all of them
BUILTIN_TEXT, BUILTIN_PROMPTS = "builtin evaluation text", "builtin prompts"
_UNIT_FACTORS = {unit: 1000.0**power for power, unit in enumerate(UNITS)} | {"ms": 1e-3, "s": 1.0}
QUANTILES_NOTE = (
    "Of the tokens that were scored: the bar holds the middle half, its gap the median, the line 5 to 95 %; "
    "the marks are 99 % and 99.9 %."
)


@dataclass(frozen=True, slots=True)
class ReportCell:
    """A table cell.

    Attributes:
        text: text of the cell.
        sort_key: number by which the cell is sorted, or its text.
        best: whether the value is the best of its column.
    """

    text: str
    sort_key: str
    best: bool


@dataclass(frozen=True, slots=True)
class SortableTable:
    """A table that the reader can sort; the first column names the rows."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[ReportCell, ...], ...]


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """Answer of one model to a prompt.

    Attributes:
        model: name of the model.
        about: length of the answer and its distance from the reference's.
        parts: text of the answer; words that differ from the reference's answer are marked.
    """

    model: str
    about: str
    parts: tuple[TextPart, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """How to reproduce a model.

    Attributes:
        model: name of the model.
        commands: commands that produce it.
        recipe_file: name of the recipe file that the commands read.
        recipe: content of the recipe file.
    """

    model: str
    commands: tuple[str, ...]
    recipe_file: str
    recipe: str


def page(evaluation: Evaluation) -> str:
    """Render the HTML page of an evaluation whose rows have short names instead of paths."""
    rows, verdict = evaluation.rows, evaluation.verdict
    prompts, count = evaluation.options.prompts, len(rows) - 1
    count_text = "1 model compared" if count == 1 else f"{count} models compared"
    return _render_page(
        title=f"{verdict.names[0]}: {count_text}",
        date=evaluation.date,
        versions=evaluation.versions,
        verdict=verdict,
        notes=notes(evaluation, column_headers(build_tables(evaluation, None, wide=True))),
        sections=[(title, charts) for title, charts in _sections(rows, verdict) if charts],
        tables=_tables(evaluation),
        detail_tables=[*_detail_tables(rows, verdict)],
        prompts=None if prompts is None else prompts.to_json(),
        answers=[] if prompts is None else answers_by_prompt(prompts.texts, verdict.names, rows),
        command=evaluation_command(evaluation, verdict.names),
        origins=[*origins(rows, verdict)],
        events=[
            (name, row["events"])
            for name, row in zip(verdict.names, rows, strict=True)
            if row["events"]
        ],
    )


def _tables(evaluation: Evaluation) -> list[Any]:
    """Return the tables of the page."""
    rows, verdict = evaluation.rows, evaluation.verdict
    tables = [sortable_table("Quality and size", quality_columns(rows, verdict))]
    if evaluation.protocol.speed_dtype:
        tables.append(sortable_table("Speed and memory", speed_columns(rows, verdict)))
    return tables + [sortable_table(*table) for table in cache_tables(rows, verdict.names)]


def _detail_tables(rows: Sequence[Any], verdict: Verdict) -> Iterator[Any]:
    """Yield the tables of values that are otherwise shown in charts only."""
    named_rows = [*zip(verdict.names, rows, strict=True)]
    quantiles = {
        name: {
            f"{100 * float(fraction):.4g} %": value
            for fraction, value in row["kl_quantiles"].items()
        }
        for name, row in named_rows
        if row["kl_quantiles"]
    }
    if quantiles:
        yield plain_table("Quantiles of the KL divergence of a token", quantiles)
    errors_by_block = {
        name: {f"block {index}": value for index, value in enumerate(row["block_errors"])}
        for name, row in named_rows
        if row["block_errors"]
    }
    if errors_by_block:
        yield plain_table("Error of each block", errors_by_block)


def _sections(rows: Sequence[Any], verdict: Verdict) -> Iterator[tuple[str, list[Chart]]]:
    """Yield the titles and charts of the sections in page order."""
    named_rows = [*zip(verdict.names, rows, strict=True)]
    pareto_chart = front_chart(rows, verdict)
    quality = [] if pareto_chart is None else [pareto_chart]
    yield (
        "Size and quality",
        [*quality, *_quality_charts(named_rows), *_perplexity_charts(named_rows)],
    )
    yield "Speed and memory", [*_speed_charts(named_rows)]
    yield "Tasks", [*_task_charts(rows, named_rows)]


def _quality_charts(named_rows: Sequence[tuple[str, Any]]) -> Iterator[Chart]:
    # A logarithmic axis cannot show a model without any divergence.
    """Yield charts of the token-level divergence and of the block errors."""
    quantiles = {
        name: row["kl_quantiles"]
        for name, row in named_rows
        if row["kl_quantiles"] and row["kl_quantiles"]["0.999"] > 0
    }
    if quantiles:
        yield quantile_chart("KL divergence of a token (nats)", QUANTILES_NOTE, quantiles)
    errors_by_block = {name: row["block_errors"] for name, row in named_rows if row["block_errors"]}
    if any(any(errors) for errors in errors_by_block.values()):
        note = f"{DEFINITION}. Errors of earlier blocks do not count."
        yield heat_map("Relative error of each block", note, errors_by_block)


def _perplexity_charts(named_rows: Sequence[tuple[str, Any]]) -> Iterator[Chart]:
    """Yield charts of perplexity and its increase."""
    perplexities = [(name, row["perplexity"], row["perplexity_se"]) for name, row in named_rows]
    note = "Lines: one standard error over windows. All models read the same windows: differences are far more certain."
    yield error_bar_chart("Perplexity", note, perplexities)
    increases = [
        (name, 100 * row["perplexity_increase"], 100 * (row["perplexity_increase_se"] or 0))
        for name, row in named_rows
        if row["perplexity_increase"] is not None
    ]
    if increases:
        note = "Against the reference, differences paired by window; lines: one standard error."
        yield error_bar_chart("Rise of perplexity (%)", note, increases)


def _speed_charts(named_rows: Sequence[tuple[str, Any]]) -> Iterator[Chart]:
    """Yield charts of time to first token, decoding speed and memory."""
    ttft = {
        name: {tokens: 1000 * value for tokens, value in row["ttft_by_prompt"].items()}
        for name, row in named_rows
        if row["ttft_by_prompt"]
    }
    if ttft:
        note = "Less is better: how long a prompt of so many tokens takes until its first token is there."
        yield series_chart("Time to the first token (ms)", note, "tokens of the prompt", ttft)
    speeds = {name: row["decode_by_batch"] for name, row in named_rows if row["decode_by_batch"]}
    if speeds:
        note = "More is better: of all sequences that are decoded together."
        yield series_chart("Tokens per second", note, "sequences at once", speeds)
    memory = {
        name: {"weights in memory": row["resident_bytes"] / 1e6, "peak": row["peak_bytes"] / 1e6}
        for name, row in named_rows
        if row["peak_bytes"]
    }
    if memory:
        note = "Less is better: what the weights take, and the most that the process took above what it began with."
        yield series_chart("Memory (MB)", note, "memory", memory)


def _task_charts(rows: Sequence[Row], named_rows: Sequence[tuple[str, Any]]) -> Iterator[Chart]:
    """Yield one chart per task and metric."""
    for task, metric in task_metrics(rows):
        scores_by_model = [(name, (row["tasks"] or {}).get(task, {})) for name, row in named_rows]
        scores = [
            (name, scores[metric], scores.get(metric + STDERR_SUFFIX))
            for name, scores in scores_by_model
            if metric in scores
        ]
        yield error_bar_chart(f"{task}: {metric}", "Lines: one standard error.", scores)


def sortable_table(caption: str, columns: Sequence[Column]) -> SortableTable:
    """Convert columns to a table of the page, without columns that have no values."""
    shown_columns = [column for column in select_columns(columns, None) if column.header]
    rows = tuple(
        tuple(
            ReportCell(
                _use_no_break_spaces(text := column.cells[row]), sort_key(text), row in column.best
            )
            for column in shown_columns
        )
        for row in range(len(shown_columns[0].cells))
    )
    return SortableTable(caption, tuple(column.header for column in shown_columns), rows)


def _use_no_break_spaces(text: str) -> str:
    """Replace the spaces of a short cell by no-break spaces."""
    return text.replace(" ", "\N{NO-BREAK SPACE}") if len(text) <= MAX_UNBROKEN_LETTERS else text


def plain_table(
    caption: str, values_by_model: Mapping[str, Mapping[str, float | None]]
) -> SortableTable:
    """Convert values by model and column name to a table; missing values are shown as a dash."""
    headers = list(dict.fromkeys(key for values in values_by_model.values() for key in values))
    rows = tuple(
        (ReportCell(name, name, False), *(_number_cell(values.get(key)) for key in headers))
        for name, values in values_by_model.items()
    )
    return SortableTable(caption, ("model", *headers), rows)


def _number_cell(value: float | None) -> ReportCell:
    """Format a number as a cell; None becomes a dash."""
    if value is None:
        return ReportCell(ABSENT, "", False)
    return ReportCell(significant(value), str(value), False)


def sort_key(text: str) -> str:
    """Return the number at the beginning of a cell in base units, or the text if there is none."""
    fields = text.removeprefix(UNRELIABLE_MARK).replace(",", " ").split()
    try:
        value = float(fields[0])
    except (IndexError, ValueError):
        return "" if text == ABSENT else text
    return str(value * _UNIT_FACTORS.get(fields[1] if len(fields) > 1 else "", 1.0))


def answers_by_prompt(
    prompts: Sequence[str], names: Sequence[str], rows: Sequence[Row]
) -> list[tuple[str, list[ShownAnswer]]]:
    """Return the prompts, each with the answers of all models, the reference first."""
    answers = [row["generated"]["answers"] for row in rows]
    return [
        (
            prompt,
            [
                _shown_answer(name, model_answers[index], answers[0][index])
                for name, model_answers in zip(names, answers, strict=True)
            ],
        )
        for index, prompt in enumerate(prompts[:MAX_SHOWN_PROMPTS])
    ]


def _shown_answer(name: str, answer: Row, reference: Row) -> ShownAnswer:
    """Prepare the answer of a model for display, with its differences from the reference's answer marked."""
    caption = f"{answer['tokens']} tokens" + ("" if answer["finished"] else ", cut there")
    if "diverges_at" in answer:
        difference = answer["diverges_at"]
        caption += (
            ", the same as the reference's" if difference is None else f", parts after {difference}"
        )
        caption += f"; KL {significant(answer['kl_mean'])}"
    return ShownAnswer(
        name,
        caption,
        tuple(mark_differences(answer["text"].strip("\n"), reference["text"].strip("\n"))),
    )


def evaluation_command(evaluation: Evaluation, names: Sequence[str]) -> str:
    """Return a command that reproduces the evaluation, with every option that affects the results.

    Files and directories are given by name only and must be in the current directory.
    """
    protocol, options = evaluation.protocol, evaluation.options
    arguments = ["quantforge", "eval", *names]
    if protocol.text != BUILTIN_TEXT and not options.text_found:
        arguments += ["--text", _source_name(protocol.text)]
    arguments += ["--windows", str(protocol.windows), "--length", str(protocol.length)]
    if (prompts := options.prompts) is not None:
        name = prompts.name
        arguments += ["--generated", "builtin" if name == BUILTIN_PROMPTS else _source_name(name)]
        arguments += ["--generated-tokens", str(prompts.new_tokens)]
        arguments += ["--chat-template"] if prompts.chat_template else []
    arguments += _measurement_options(options)
    arguments += ["--adapter", _source_name(protocol.adapter)] if protocol.adapter else []
    arguments += ["--correction", _source_name(protocol.correction)] if protocol.correction else []
    arguments += [] if protocol.speed_dtype else ["--no-speed"]
    arguments += [] if protocol.input_bits == 16 else ["--input-bits", str(protocol.input_bits)]
    if protocol.device != "cpu":
        arguments += ["--device", protocol.device]
    elif protocol.speed_dtype:
        arguments += ["--threads", str(protocol.threads)]
    return shlex.join([*arguments, "--report", "report.html"])


def _measurement_options(options: EvaluationOptions) -> Iterator[str]:
    """Yield the options of optional measurements, which the protocol does not contain."""
    if options.tasks is not None:
        tasks = options.tasks
        names = [Path(name).name if name.endswith(YAML_SUFFIXES) else name for name in tasks.names]
        yield from ("--tasks", ",".join(names))
        yield from ("--task-limit", str(tasks.limit)) if tasks.limit else ()
        yield from ("--allow-code",) if tasks.allow_code else ()
    if options.caches:
        yield from ("--cache", ",".join(options.caches))
    if options.engine:
        yield from ("--engine", options.engine)


def origins(rows: Iterable[Row], verdict: Verdict) -> Iterator[Origin]:
    """Yield how to reproduce each model that records its source and recipe."""
    for name, row in zip(verdict.names, rows, strict=True):
        made_by = row.get("made_by")
        if not made_by or not made_by["source"] or not made_by["recipe"]:
            continue
        file_stem = name.replace("/", "-")
        recipe_file, quantized_name = (
            f"{file_stem}.toml",
            f"{file_stem}-source" if made_by["exported"] else name,
        )
        commands = [
            shlex.join(
                [
                    "quantforge",
                    "quantize",
                    made_by["source"],
                    "--recipe",
                    recipe_file,
                    "-o",
                    quantized_name,
                ]
            )
        ]
        if made_by["exported"]:
            commands.append(
                shlex.join(
                    ["quantforge", "export", quantized_name, "--format", row["format"], "-o", name]
                )
            )
        yield Origin(name, tuple(commands), recipe_file, made_by["recipe"])


def _source_name(name: str) -> str:
    """Return the name of a cited source without its digest."""
    return name.partition(" (SHA-256")[0]


def mark_differences(text: str, reference: str) -> list[TextPart]:
    """Split a text into parts that it shares with a reference text and parts that differ, in order."""
    tokens, reference_tokens = (re.findall(r"\s+|[^\s]+", item) for item in (text, reference))
    text_parts: list[TextPart] = []
    matcher = SequenceMatcher(None, tokens, reference_tokens, autojunk=False)
    for operation, first, end, _, _ in matcher.get_opcodes():
        span_text = "".join(tokens[first:end])
        if span_text:
            text_parts.append((span_text, operation != "equal" and not span_text.isspace()))
    return text_parts


def _render_page(**values: Any) -> str:
    """Render the page template; text from outside (names, texts, recipes) is escaped, rendered charts are not."""
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
