"""``quantforge eval``: one table for a reference and its descendants, whatever their format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantforge.checkpoint.disk import check_new, save
from quantforge.cli import options
from quantforge.cli.console import Console
from quantforge.cli.request import percent
from quantforge.errors import UsageError
from quantforge.evaluation.task_code import YAML
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import Evaluation

REPORTS = {".md": "markdown", ".html": "html", ".json": "json"}
EXAMPLE = "Example: quantforge eval models/demo demo-rtn demo-awq --max-ppl-increase 5%"

Reference = Annotated[str, typer.Argument(help="The model to compare with.")]
Descendants = Annotated[list[str] | None, typer.Argument(help="Models that descend from it.")]
Text = Annotated[
    str,
    typer.Option("--text", metavar="SOURCE", help="What is scored: a SOURCE as for --calibration."),
]
WindowCount = Annotated[int, typer.Option("--windows", help="At most so many windows.", min=1)]
WindowLength = Annotated[int, typer.Option("--length", help="Tokens of a window.", min=2)]
PerplexityLimit = Annotated[
    str | None,
    typer.Option(metavar="SHARE", help="Exit 6 when perplexity rises by more, e.g. 2%."),
]
DivergenceLimit = Annotated[
    float | None, typer.Option(help="Exit 6 when the mean KL divergence is larger, in nats.")
]
Reports = Annotated[
    list[Path] | None,
    typer.Option("--report", help="Also write FILE.md, .html or .json (repeatable)."),
]
ReplaceReports = Annotated[bool, typer.Option("--overwrite", help="Replace reports that exist.")]
Speed = Annotated[bool, typer.Option(help="Measure speed and memory too.")]
CacheKind = Annotated[
    str,
    typer.Option("--cache", metavar="KIND", help="KV cache for speed: 16bit, int8, fp8, int4."),
]
GgufEngine = Annotated[
    str, typer.Option("--engine", help="llama.cpp: score GGUF files in it too (needs xllamacpp).")
]
TaskNames = Annotated[
    str | None,
    typer.Option(
        "--tasks", metavar="NAMES", help="lm-eval's tasks, or YAML files (needs lm-eval)."
    ),
]
TaskLimit = Annotated[
    int, typer.Option("--task-limit", help="Documents of each task; 0 is all.", min=0)
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Let YAML files of --tasks run the code they name.")
]


def evaluate(
    reference: Reference,
    models: Descendants = None,
    text: Text = "builtin",
    windows: WindowCount = 80,
    length: WindowLength = 512,
    max_ppl_increase: PerplexityLimit = None,
    max_kl: DivergenceLimit = None,
    report: Reports = None,
    overwrite: ReplaceReports = False,
    speed: Speed = True,
    cache: CacheKind = "16bit",
    engine: GgufEngine = "",
    tasks: TaskNames = None,
    task_limit: TaskLimit = 0,
    allow_code: AllowCode = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    activations: options.Activations = "memory",
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare models with a reference: perplexity, divergence, size, memory and speed."""
    from quantforge import verbs

    console = Console(as_json=as_json, quiet=quiet or as_json)
    _check_reports(report or [], overwrite)
    limit = None if max_ppl_increase is None else percent(max_ppl_increase, "--max-ppl-increase")
    names = None if tasks is None else [*filter(None, map(str.strip, tasks.split(",")))]
    if allow_code and any(name.endswith(YAML) for name in names or ()):
        console.note("--allow-code: the task files may run code as you")
    settings = Settings(device=device, threads=threads, activations=activations, offline=offline)
    found = verbs.evaluate(
        reference, models or (), settings, text=text, windows=windows, length=length, speed=speed, cache=cache,
        engine=engine, tasks=names, task_limit=task_limit, allow_code=allow_code,
        progress=lambda what, done, total: console.progress(
            f"{what}: {done}/{total} windows", last=done == total
        ),
    )  # fmt: skip
    _show(console, found, report or [], overwrite=overwrite)
    from quantforge.evaluation.evaluate import check_gates

    check_gates(found, limit, max_kl)


def _show(console: Console, found: Evaluation, reports: list[Path], *, overwrite: bool) -> None:
    """Write the reports, then print the document or the table."""
    from quantforge.evaluation.report import notes, render, table

    for path in reports:
        save(path, render(found, REPORTS[path.suffix]).encode(), overwrite=overwrite)
    if console.as_json:
        console.document(found.to_json())
        return
    figures = table(found)
    console.table(figures.headers, figures.rows)
    for line in notes(found):
        console.text(line)


def _check_reports(paths: list[Path], overwrite: bool) -> None:
    """Check report files before the work: their kind, and whether they can be written."""
    for path in paths:
        if path.suffix not in REPORTS:
            raise UsageError(f"--report {path}: unknown kind", f"end it in {', '.join(REPORTS)}")
        check_new(path, "--report", overwrite=overwrite)
