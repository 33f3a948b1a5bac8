"""``quantforge eval``: one table for a reference and its descendants, whatever their format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantforge.checkpoint.disk import check_new, save
from quantforge.cli import options
from quantforge.cli.completion import among, cache_kinds, models
from quantforge.cli.console import Console
from quantforge.cli.request import percent
from quantforge.errors import UsageError
from quantforge.evaluation.task_code import YAML
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import Evaluation

REPORTS = {".md": "markdown", ".html": "html", ".json": "json"}
EXAMPLE = "Example: quantforge eval demo demo-awq-int4 --max-ppl-increase 5%"

SCORED, SPEED, WRITTEN = "What is scored", "Speed and memory", "What comes of it"

Reference = Annotated[
    str,
    typer.Argument(help="The model to compare with.", metavar="REFERENCE", autocompletion=models),
]
Descendants = Annotated[
    list[str] | None,
    typer.Argument(
        help="Models that descend from it.", metavar="[MODEL]...", autocompletion=models
    ),
]
Text = Annotated[
    str,
    typer.Option(
        "--text",
        metavar="SOURCE",
        help="What is scored: a SOURCE as for --calibration.",
        rich_help_panel=SCORED,
    ),
]
WindowCount = Annotated[
    int,
    typer.Option(
        "--windows", metavar="N", help="At most so many windows.", min=1, rich_help_panel=SCORED
    ),
]
WindowLength = Annotated[
    int,
    typer.Option(
        "--length", metavar="N", help="Tokens of a window.", min=2, rich_help_panel=SCORED
    ),
]
PerplexityLimit = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Exit 6 when perplexity rises by more, e.g. 2%.",
        rich_help_panel=WRITTEN,
    ),
]
DivergenceLimit = Annotated[
    float | None,
    typer.Option(
        metavar="NATS",
        help="Exit 6 when the mean KL divergence is larger, in nats.",
        rich_help_panel=WRITTEN,
    ),
]
Reports = Annotated[
    list[Path] | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Also write FILE.md, .html (pip install 'quantforge[report]') or .json (repeatable).",
        rich_help_panel=WRITTEN,
    ),
]
ReplaceReports = Annotated[
    bool, typer.Option("--overwrite", help="Replace reports that exist.", rich_help_panel=WRITTEN)
]
Wide = Annotated[
    bool,
    typer.Option(
        "--wide", help="All columns, also those for experts, however wide.", rich_help_panel=WRITTEN
    ),
]
Card = Annotated[
    Path | None,
    typer.Option(
        "--card",
        metavar="DIR",
        help="Also write the figures into DIR's README.md.",
        rich_help_panel=WRITTEN,
    ),
]
Speed = Annotated[bool, typer.Option(help="Measure speed and memory too.", rich_help_panel=SPEED)]
CacheKind = Annotated[
    str,
    typer.Option(
        "--cache",
        metavar="KIND",
        autocompletion=cache_kinds,
        help="KV cache for speed: 16bit, int8, fp8, int4.",
        rich_help_panel=SPEED,
    ),
]
GgufEngine = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        autocompletion=among(("llama.cpp",)),
        help="llama.cpp: score GGUF files in it too (pip install 'quantforge[llamacpp]').",
        rich_help_panel=SCORED,
    ),
]
TaskNames = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="NAMES",
        help="lm-eval's tasks, or YAML files (pip install 'quantforge[eval]').",
        rich_help_panel=SCORED,
    ),
]
TaskLimit = Annotated[
    int,
    typer.Option(
        "--task-limit",
        metavar="N",
        help="Documents of each task; 0 is all.",
        min=0,
        rich_help_panel=SCORED,
    ),
]
Generated = Annotated[
    str | None,
    typer.Option(
        "--generated",
        metavar="PROMPTS",
        help="Also score along the reference's own answers: a file, or builtin.",
        rich_help_panel=SCORED,
    ),
]
GeneratedTokens = Annotated[
    int,
    typer.Option(
        "--generated-tokens", help="Tokens of an answer, at most.", min=1, rich_help_panel=SCORED
    ),
]
ChatTemplate = Annotated[
    bool,
    typer.Option(
        "--chat-template",
        help="Render the prompts through the model's template (sandboxed).",
        rich_help_panel=SCORED,
    ),
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Let YAML files of --tasks run the code they name.",
        rich_help_panel=SCORED,
    ),
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
    card: Card = None,
    speed: Speed = True,
    cache: CacheKind = "16bit",
    engine: GgufEngine = "",
    tasks: TaskNames = None,
    task_limit: TaskLimit = 0,
    allow_code: AllowCode = False,
    generated: Generated = None,
    generated_tokens: GeneratedTokens = 128,
    chat_template: ChatTemplate = False,
    adapter: options.Adapter = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    activations: options.Activations = "memory",
    offline: options.Offline = False,
    wide: Wide = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    json_progress: options.JsonProgress = False,
) -> None:
    """Compare models with a reference: perplexity, divergence, size, memory and speed."""
    console = Console(as_json=as_json, quiet=quiet or as_json, machine=json_progress)
    _check_reports(report or [], overwrite)
    limit = None if max_ppl_increase is None else percent(max_ppl_increase, "--max-ppl-increase")
    names = None if tasks is None else [*filter(None, map(str.strip, tasks.split(",")))]
    if allow_code and any(name.endswith(YAML) for name in names or ()):
        console.note("--allow-code: the task files may run code as you")
    settings = Settings(
        device=device, threads=threads, activations=activations, offline=offline, adapter=adapter,
        progress=console.show, note=console.note,
    )  # fmt: skip
    with console.watch():
        from quantforge import verbs

        found = verbs.evaluate(
            reference, models or (), settings, text=text, windows=windows, length=length, speed=speed, cache=cache,
            engine=engine, tasks=names, task_limit=task_limit, allow_code=allow_code, card=card,
            generated=generated or "", generated_tokens=generated_tokens, chat_template=chat_template,
        )  # fmt: skip
    _show(console, found, report or [], overwrite=overwrite, wide=wide)
    from quantforge.evaluation.gates import check_gates

    check_gates(found, limit, max_kl)


def _show(
    console: Console, found: Evaluation, reports: list[Path], *, overwrite: bool, wide: bool
) -> None:
    """Write the reports, then print the document, or the tables with the verdict."""
    from quantforge.evaluation.report import render

    for path in reports:
        save(path, render(found, REPORTS[path.suffix]).encode(), overwrite=overwrite)
    if console.as_json:
        console.document(found.to_json())
    else:
        show_tables(console, found, wide=wide)


def show_tables(console: Console, found: Evaluation, *, wide: bool) -> None:
    """Print the two tables, the verdict in words, and the protocol."""
    from quantforge.evaluation.report import notes, tables, titles
    from quantforge.evaluation.text_tables import ON_FRONT

    verdict = found.verdict
    against = f", against {verdict.names[0]} (the reference)" if len(found.rows) > 1 else ""
    drawn = tables(found, console.width, wide=wide)
    for title, columns in zip((f"Quality{against}", "Speed and memory"), drawn, strict=False):
        console.columns(columns, title)
        console.text()
    for sentence in verdict.sentences:
        console.wrapped(sentence)
    if verdict.front:
        console.wrapped(f"{ON_FRONT} no other is as small and closer (Pareto front)")
    if verdict.sentences:
        console.text()
    for line in notes(found, titles(drawn)):
        console.wrapped(line)


def _check_reports(paths: list[Path], overwrite: bool) -> None:
    """Check report files before the work: their kind, and whether they can be written."""
    for path in paths:
        if path.suffix not in REPORTS:
            raise UsageError(f"--report {path}: unknown kind", f"end it in {', '.join(REPORTS)}")
        check_new(path, "--report", overwrite=overwrite)
    if any(path.suffix == ".html" for path in paths):
        from quantforge.evaluation.report_page.drawing import check_drawing

        check_drawing()
