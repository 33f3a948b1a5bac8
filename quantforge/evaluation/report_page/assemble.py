"""The page, put together from its sections; a section without figures is left out."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from quantforge.evaluation.block_errors import DEFINITION
from quantforge.evaluation.cache_tables import cache_tables
from quantforge.evaluation.report_page.charts import heat, quantiles, series, with_errors
from quantforge.evaluation.report_page.drawing import Chart
from quantforge.evaluation.report_page.front_chart import front_chart
from quantforge.evaluation.report_page.sections import (
    answers,
    evaluation_command,
    origins,
    plain_table,
    sortable,
)
from quantforge.evaluation.tasks import TASK_ERROR
from quantforge.evaluation.text_tables import quality_columns, speed_columns
from quantforge.evaluation.verdict import Verdict

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import Evaluation

TEMPLATE = "page.html.jinja"
QUANTILES_NOTE = (
    "Of the tokens that were scored: the bar holds the middle half, its gap the median, the line 5 to 95 %; "
    "the marks are 99 % and 99.9 %."
)


def assemble(evaluation: Evaluation, notes: Sequence[str]) -> str:
    """Return the page of an evaluation, whose rows are named without paths.

    Args:
        evaluation: the result.
        notes: the protocol and the meaning of the figures, as they stand under the tables of the command line.
    """
    rows, verdict = evaluation.rows, evaluation.verdict
    prompts = evaluation.prompts
    return _rendered(
        TEMPLATE,
        title=f"{verdict.names[0]}: {_count(len(rows) - 1)}",
        made=evaluation.made,
        verdict=verdict,
        notes=notes,
        sections=[(title, charts) for title, charts in _sections(rows, verdict) if charts],
        tables=_tables(evaluation),
        detail_tables=[*_detail_tables(rows, verdict)],
        prompts=None if prompts is None else prompts.to_json(),
        answers=[] if prompts is None else answers(prompts.texts, verdict.names, rows),
        command=evaluation_command(
            verdict.names,
            evaluation.protocol,
            None if prompts is None else prompts.to_json(),
            evaluation.options,
        ),
        origins=[*origins(rows, verdict)],
        events=[
            (name, row["events"])
            for name, row in zip(verdict.names, rows, strict=True)
            if row["events"]
        ],
    )


def _count(models: int) -> str:
    return "1 model compared" if models == 1 else f"{models} models compared"


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
        name: {_percent(share): value
               for share, value in row["kl_quantiles"].items()}
        for name, row in named if row["kl_quantiles"]
    }  # fmt: skip
    if shares:
        yield plain_table("Quantiles of the KL divergence of a token", shares)
    blocks = {
        name: {f"block {index}": value for index, value in enumerate(row["block_errors"])}
        for name, row in named
        if row["block_errors"]
    }
    if blocks:
        yield plain_table("Error of each block", blocks)


def _percent(share: str) -> str:
    return f"{100 * float(share):.4g} %"


def _sections(rows: Sequence[Any], verdict: Verdict) -> Iterator[tuple[str, list[Chart]]]:
    """Yield the sections of charts with their titles, in the order of the page."""
    named = [*zip(verdict.names, rows, strict=True)]
    front = front_chart(rows, verdict)
    quality = [] if front is None else [front]
    yield "Size and quality", [*quality, *_quality_charts(named), *_perplexity_charts(named)]
    yield "Speed and memory", [*_speed_charts(named)]
    yield "Tasks", [*_task_charts(named)]


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


def _task_charts(named: Sequence[tuple[str, Any]]) -> Iterator[Chart]:
    asked = dict.fromkeys(
        (task, metric)
        for _, row in named
        for task, figures in (row["tasks"] or {}).items()
        for metric in figures
        if not metric.endswith(TASK_ERROR)
    )
    for task, metric in asked:
        found = [(name, (row["tasks"] or {}).get(task, {})) for name, row in named]
        figures = [
            (name, figures[metric], figures.get(metric + TASK_ERROR))
            for name, figures in found
            if metric in figures
        ]
        yield with_errors(f"{task}: {metric}", "Lines: one standard error.", figures)


def _rendered(template: str, **values: Any) -> str:
    """Return a page; whatever is foreign (names, texts, recipes) is escaped, what is drawn is ours.

    Args:
        template: its file; it extends ``frame.html.jinja``.
        values: what it names.
    """
    environment = Environment(
        loader=PackageLoader("quantforge.evaluation", "report_page"),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    source = environment.loader
    assert source is not None
    style, script = (source.get_source(environment, name)[0] for name in ("page.css", "sort.js"))
    return environment.get_template(template).render(
        style=style,
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )
