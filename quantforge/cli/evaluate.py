"""``quantforge eval``: one table for a reference and its descendants, whatever their format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.checkpoint.disk import check_new, save
from quantforge.cli import evaluate_options as wanted
from quantforge.cli import options
from quantforge.cli.console import Console
from quantforge.cli.request import percent
from quantforge.errors import GateError, UsageError
from quantforge.evaluation.gates import check_gates, check_held, write_summary
from quantforge.evaluation.tasks import YAML
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import Evaluation

REPORTS = {".md": "markdown", ".html": "html", ".json": "json"}
EXAMPLE = "Example: quantforge eval demo demo-gptq-int4 --max-ppl-increase 5%"


def evaluate(
    reference: wanted.Reference,
    models: wanted.Descendants = None,
    text: wanted.Text = None,
    windows: wanted.WindowCount = 80,
    length: wanted.WindowLength = 512,
    max_ppl_increase: wanted.PerplexityLimit = None,
    max_kl: wanted.DivergenceLimit = None,
    report: wanted.Reports = None,
    summary: wanted.Summary = None,
    overwrite: wanted.ReplaceReports = False,
    card: wanted.Card = None,
    speed: wanted.Speed = True,
    cache: wanted.Caches = None,
    engine: wanted.GgufEngine = "",
    tasks: wanted.TaskNames = None,
    task_limit: wanted.TaskLimit = 0,
    allow_code: wanted.AllowCode = False,
    generated: wanted.Generated = None,
    generated_tokens: wanted.GeneratedTokens = None,
    chat_template: wanted.ChatTemplate = False,
    adapter: options.Adapter = None,
    correction: wanted.Correction = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    input_bits: options.InputBits = 16,
    activations: options.Activations = "memory",
    offline: options.Offline = False,
    wide: wanted.Wide = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    json_progress: options.JsonProgress = False,
) -> None:
    """Compare models with a reference: perplexity, divergence, size, memory and speed."""
    console = Console(as_json=as_json, quiet=quiet or as_json, machine=json_progress)
    check_reports(report or [], summary, overwrite=overwrite)
    limit = None if max_ppl_increase is None else percent(max_ppl_increase, "--max-ppl-increase")
    check_held(models or (), limit, max_kl)
    names = None if tasks is None else [*filter(None, map(str.strip, tasks.split(",")))]
    if allow_code and any(name.endswith(YAML) for name in names or ()):
        console.note("--allow-code: the task files may run code as you")
    settings = Settings(
        device=device, threads=threads, activations=activations, offline=offline, adapter=adapter,
        input_bits=input_bits, progress=console.show, note=console.note,
    )  # fmt: skip
    with console.watch():
        from quantforge import verbs

        found = verbs.evaluate(
            reference, models or (), settings, text=text, windows=windows, length=length, speed=speed,
            **({} if cache is None else {"cache": cache}),
            engine=engine, tasks=names, task_limit=task_limit, allow_code=allow_code, card=card,
            generated=generated or "", generated_tokens=generated_tokens or 0, chat_template=chat_template,
            correction=correction,
        )  # fmt: skip
    if console.as_json:
        console.document(found.to_json())
    else:
        show_tables(console, found, wide=wide)
    save_reports(found, report or [], overwrite=overwrite)
    _hold(found, limit, max_kl, summary)


def _hold(
    found: Evaluation, max_ppl_increase: float | None, max_kl: float | None, summary: Path | None
) -> None:
    """Hold the models to the limits; the job's summary is written before they end the command."""
    try:
        check_gates(found, max_ppl_increase, max_kl)
    except GateError as error:
        write_summary(summary, found, error.message)
        raise
    write_summary(summary, found)


def save_reports(found: Evaluation, reports: Sequence[Path], *, overwrite: bool) -> None:
    """Write the reports of an evaluation, each in the kind of its name; errors as of `save`."""
    from quantforge.evaluation.report import render

    for path in reports:
        save(path, render(found, REPORTS[path.suffix]).encode(), overwrite=overwrite)


def show_tables(console: Console, found: Evaluation, *, wide: bool) -> None:
    """Print the tables, the verdict in words, and the protocol."""
    from quantforge.evaluation.text_tables import ON_FRONT, absent_columns, notes, tables, titles

    verdict = found.verdict
    drawn = tables(found, console.width, wide=wide)
    for title, columns in drawn:
        console.columns(columns, title)
        console.text()
    if absent := absent_columns(found, drawn):
        console.wrapped(absent)
        console.text()
    for sentence in verdict.sentences:
        console.wrapped(sentence)
    if verdict.front:
        console.wrapped(f"{ON_FRONT} no other is as small and closer (Pareto front)")
    if verdict.sentences:
        console.text()
    for line in notes(found, titles(drawn)):
        console.wrapped(line)


def check_reports(paths: list[Path], summary: Path | None, *, overwrite: bool) -> None:
    """Check report files and a job's summary before the work: their kind, and whether they can be written."""
    if summary is not None:
        check_new(summary, "--summary", overwrite=True, adds=True)
    for path in paths:
        if path.suffix not in REPORTS:
            raise UsageError(f"--report {path}: unknown kind", f"end it in {', '.join(REPORTS)}")
        check_new(path, "--report", overwrite=overwrite)
    if any(path.suffix == ".html" for path in paths):
        from quantforge.evaluation.report_page.charts import check_drawing

        check_drawing()
