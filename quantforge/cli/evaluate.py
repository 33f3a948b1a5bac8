"""``quantforge eval``: compare a reference with models derived from it, of any format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantforge.cache_kinds import FORM, WORDS, completions
from quantforge.cli import options
from quantforge.cli.console import Console
from quantforge.errors import GateError, UsageError
from quantforge.evaluation.tasks import YAML_SUFFIXES
from quantforge.files.disk import append_to_file, check_new_file, save_file
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation

REPORT_KINDS = {".md": "markdown", ".html": "html", ".json": "json"}
EXAMPLE = "Example: quantforge eval demo demo-gptq-int4 --max-ppl-increase 5%"


def _scoring_option(*flags: str, **keywords: Any) -> Any:
    return typer.Option(*flags, rich_help_panel="What is scored", **keywords)


def _output_option(*flags: str, **keywords: Any) -> Any:
    return typer.Option(*flags, rich_help_panel="What comes of it", **keywords)


Reference = Annotated[str, typer.Argument(help="The model to compare with.", metavar="REFERENCE")]
ComparedModels = Annotated[
    list[str] | None, typer.Argument(help="Models that descend from it.", metavar="[MODEL]...")
]
Text = Annotated[
    str | None,
    _scoring_option(
        "--text",
        metavar="SOURCE",
        help="What is scored: a SOURCE as for --calibration (default: the reference's evaluation.txt, else builtin).",
    ),
]
WindowCount = Annotated[
    int, _scoring_option("--windows", metavar="N", help="At most so many windows.", min=1)
]
WindowLength = Annotated[
    int, _scoring_option("--length", metavar="N", help="Tokens of a window.", min=2)
]
PerplexityLimit = Annotated[
    str | None,
    _output_option(metavar="SHARE", help="Exit 6 when perplexity rises by more, e.g. 2%."),
]
DivergenceLimit = Annotated[
    float | None,
    _output_option(metavar="NATS", help="Exit 6 when the mean KL divergence is larger, in nats."),
]
Reports = Annotated[
    list[Path] | None,
    _output_option(
        "--report",
        metavar="FILE",
        help="Also write FILE.md, .html (pip install 'quantforge[report]') or .json (repeatable).",
    ),
]
Summary = Annotated[
    Path | None,
    _output_option(
        "--summary",
        metavar="FILE",
        help="Also add table and verdict to FILE as Markdown: a CI's job summary.",
    ),
]
ReplaceReports = Annotated[bool, _output_option("--overwrite", help="Replace reports that exist.")]
Wide = Annotated[
    bool, _output_option("--wide", help="All columns, also those for experts, however wide.")
]
Card = Annotated[
    Path | None,
    _output_option("--card", metavar="DIR", help="Also write the figures into DIR's README.md."),
]
Speed = Annotated[
    bool, typer.Option(help="Measure speed and memory too.", rich_help_panel="Speed and memory")
]
Caches = Annotated[
    str | None,
    _scoring_option(
        "--cache",
        metavar="KIND,...",
        autocompletion=completions,
        help=f"KV caches ({', '.join(WORDS)}, {FORM}): what each costs, by position; the first also for speed.",
    ),
]
GgufEngine = Annotated[
    str,
    _scoring_option(
        "--engine",
        metavar="ENGINE",
        autocompletion=options.complete_from(["llama.cpp"]),
        help="llama.cpp: score GGUF files in it too (pip install 'quantforge[llamacpp]').",
    ),
]
TaskNames = Annotated[
    str | None,
    _scoring_option(
        "--tasks",
        metavar="NAMES",
        help="lm-eval's tasks, or YAML files (pip install 'quantforge[eval]').",
    ),
]
TaskLimit = Annotated[
    int,
    _scoring_option("--task-limit", metavar="N", help="Documents of each task; 0 is all.", min=0),
]
Generated = Annotated[
    str | None,
    _scoring_option(
        "--generated",
        metavar="PROMPTS",
        help="Also score along the reference's own answers: a file, or builtin.",
    ),
]
GeneratedTokens = Annotated[
    int | None,
    _scoring_option(
        "--generated-tokens", help="Tokens of an answer, at most (default: 128).", min=1
    ),
]
ChatTemplate = Annotated[
    bool,
    _scoring_option(
        "--chat-template", help="Render the prompts through the model's template (sandboxed)."
    ),
]
Correction = Annotated[
    Path | None,
    _scoring_option(
        "--correction",
        metavar="DIR",
        help="Put this adapter (of PEFT's LoRA) on the one model that is compared; no speed of it.",
    ),
]
AllowCode = Annotated[
    bool, _scoring_option("--allow-code", help="Let YAML files of --tasks run the code they name.")
]


def evaluate(
    reference: Reference,
    models: ComparedModels = None,
    text: Text = None,
    windows: WindowCount = 80,
    length: WindowLength = 512,
    max_ppl_increase: PerplexityLimit = None,
    max_kl: DivergenceLimit = None,
    report: Reports = None,
    summary: Summary = None,
    overwrite: ReplaceReports = False,
    card: Card = None,
    speed: Speed = True,
    cache: Caches = None,
    engine: GgufEngine = "",
    tasks: TaskNames = None,
    task_limit: TaskLimit = 0,
    allow_code: AllowCode = False,
    generated: Generated = None,
    generated_tokens: GeneratedTokens = None,
    chat_template: ChatTemplate = False,
    adapter: options.Adapter = None,
    correction: Correction = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    input_bits: options.InputBits = 16,
    activations: options.Activations = "memory",
    offline: options.Offline = False,
    wide: Wide = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    json_progress: options.JsonProgress = False,
) -> None:
    """Compare models with a reference: perplexity, divergence, size, memory and speed."""
    console = Console(as_json=as_json, quiet=quiet or as_json, machine=json_progress)
    check_reports(report or [], summary, overwrite=overwrite)
    limit = (
        None
        if max_ppl_increase is None
        else options.parse_percent(max_ppl_increase, "--max-ppl-increase")
    )
    if not models and (limit is not None or max_kl is not None):
        raise UsageError(
            "a quality gate holds models to a limit, and only the reference is given",
            "name the models behind it: quantforge eval REFERENCE MODEL...",
        )
    names = None if tasks is None else [*filter(None, map(str.strip, tasks.split(",")))]
    if allow_code and any(name.endswith(YAML_SUFFIXES) for name in names or ()):
        console.note("--allow-code: the task files may run code as you")
    settings = Settings(
        device=device,
        threads=threads,
        activations=activations,
        offline=offline,
        adapter=adapter,
        input_bits=input_bits,
        progress=console.show_progress,
        note=console.note,
    )
    with console.progress_meter():
        from quantforge import api

        evaluation = api.evaluate(
            reference,
            models or (),
            settings,
            text=text,
            windows=windows,
            length=length,
            speed=speed,
            cache=() if cache is None else cache,
            engine=engine,
            tasks=names,
            task_limit=task_limit,
            allow_code=allow_code,
            card=card,
            generated=generated or "",
            generated_tokens=generated_tokens or 0,
            chat_template=chat_template,
            correction=correction,
        )
    if console.as_json:
        console.print_document(evaluation.to_json())
    else:
        show_tables(console, evaluation, wide=wide)
    save_reports(evaluation, report or [], overwrite=overwrite)
    failure_text = failed_gates(evaluation, limit, max_kl)
    write_summary(summary, evaluation, failure_text)
    if failure_text:
        raise GateError(
            failure_text, "use more bits, smaller groups or another method, or raise the limit"
        )


def check_reports(paths: list[Path], summary: Path | None, *, overwrite: bool) -> None:
    """Check before the work that report files and the CI summary have a known kind and can be written."""
    if summary is not None:
        check_new_file(summary, "--summary", overwrite=True, appends=True)
    for path in paths:
        if path.suffix not in REPORT_KINDS:
            raise UsageError(
                f"--report {path}: unknown kind", f"end it in {', '.join(REPORT_KINDS)}"
            )
        check_new_file(path, "--report", overwrite=overwrite)
    if any(path.suffix == ".html" for path in paths):
        from quantforge.evaluation.report_page.charts import check_drawing

        check_drawing()


def show_tables(console: Console, evaluation: Evaluation, *, wide: bool) -> None:
    """Print the tables, the verdict and the notes on the protocol."""
    from quantforge.evaluation.text_tables import (
        PARETO_MARK,
        build_tables,
        column_headers,
        describe_omitted_columns,
        notes,
    )

    verdict = evaluation.verdict
    shown_tables = build_tables(evaluation, console.width, wide=wide)
    for title, columns in shown_tables:
        console.print_columns(columns, title)
        console.print_text()
    if hidden_text := describe_omitted_columns(evaluation, shown_tables):
        console.print_wrapped(hidden_text)
        console.print_text()
    for sentence in verdict.sentences:
        console.print_wrapped(sentence)
    if verdict.pareto_front:
        console.print_wrapped(f"{PARETO_MARK} no other is as small and closer (Pareto front)")
    if verdict.sentences:
        console.print_text()
    for line in notes(evaluation, column_headers(shown_tables)):
        console.print_wrapped(line)


def save_reports(evaluation: Evaluation, reports: Sequence[Path], *, overwrite: bool) -> None:
    """Write the reports of an evaluation in the formats of their suffixes; errors as `save_file`."""
    from quantforge.evaluation.report import render

    for path in reports:
        save_file(path, render(evaluation, REPORT_KINDS[path.suffix]).encode(), overwrite=overwrite)


def failed_gates(
    evaluation: Evaluation, max_ppl_increase: float | None = None, max_kl: float | None = None
) -> str:
    """Return a message that lists every model beyond a limit, with its figure; "" if there is none.

    Args:
        evaluation: the evaluation.
        max_ppl_increase: relative to the reference, e.g. 0.02.
        max_kl: mean KL divergence in nats per token.
    """
    limits = (
        ("perplexity_increase", max_ppl_increase, "perplexity increased by {:.2%}, at most {:.2%}"),
        ("kl_mean", max_kl, "KL divergence {:.4g}, at most {:.4g}"),
    )
    failure_texts = [
        f"{row['path']}: {text.format(row[key], limit)}"
        for row in evaluation.rows[1:]
        for key, limit, text in limits
        if limit is not None and row[key] > limit
    ]
    return (
        f"{len(failure_texts)} quality gate(s) failed: {'; '.join(failure_texts)}"
        if failure_texts
        else ""
    )


def write_summary(path: Path | None, evaluation: Evaluation, failure_text: str = "") -> None:
    """Append the table and verdict of an evaluation to a CI job summary, as GitHub-flavored Markdown.

    All steps of a job append to the same file (`GITHUB_STEP_SUMMARY` on GitHub).

    Args:
        path: the summary file; nothing is written if it is None.
        evaluation: the evaluation.
        failure_text: message about failed gates, from `failed_gates`.

    Raises:
        ResourceError: the file cannot be written.
    """
    if path is not None:
        from quantforge.evaluation.report import render  # with torch

        verdict = f"**Failed:** {failure_text}\n\n" if failure_text else ""
        append_to_file(
            path, f"## Evaluation\n\n{verdict}{render(evaluation, 'markdown')}\n".encode()
        )
