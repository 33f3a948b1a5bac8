"""``quantforge sweep``: all combinations of some choices, and which of them nothing beats."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantforge.cli import choices, evaluate, options, processes
from quantforge.cli.console import Console
from quantforge.cli.path_arguments import from_here, shown
from quantforge.errors import UsageError

if TYPE_CHECKING:
    from quantforge.api import Swept

EXAMPLE = "Example: quantforge sweep demo --over bits=3,4 --over method=rtn,gptq"

Varied = Annotated[
    list[str],
    typer.Option(
        "--over",
        metavar="CHOICE=VALUE,VALUE",
        help="What is varied: an option of quantize without its dashes (repeatable).",
    ),
]
Place = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        help="Directory of the results, new or to go on with (default: MODEL-sweep).",
    ),
]
ScoredLength = Annotated[
    int, typer.Option("--window-length", metavar="N", help="Tokens of a window.", min=2)
]
Speed = Annotated[bool, typer.Option("--speed/--no-speed", help="Also measure speed and memory.")]
Replace = Annotated[
    bool, typer.Option("--overwrite", help="Replace results and reports that are there.")
]


@options.takes(
    given=choices.recipe_parameters(choices.RECIPE),
    run=options.run_options(*options.WHERE, *options.SHARED, *options.ACCEPTED, *options.SHOWN),
)
def sweep(
    model: options.Model,
    *,
    over: Varied,
    output: Place = None,
    given: options.Given,
    text: evaluate.Text = None,
    windows: evaluate.WindowCount = 80,
    window_length: ScoredLength = 512,
    speed: Speed = False,
    report: evaluate.Reports = None,
    summary: evaluate.Summary = None,
    overwrite: Replace = False,
    wide: evaluate.Wide = False,
    run: options.Given,
) -> None:
    """Quantize a model by all combinations of some choices, measure them, and mark those that no other beats.

    The same command goes on after any interruption. Combinations that cannot be made are left out and named, refused
    with --strict.
    """
    console = processes.console_of(run)
    evaluate.check_reports(report or [], summary, overwrite=overwrite)
    settings = processes.settings_of(run, console, overwrite=overwrite)
    grid, out = _grid(over), output or _place(model)
    with console.watch(), processes.started(run["jobs"], console.note) as failed:
        from quantforge import api
        from quantforge.api.sweep import make_results

        if processes.silent():
            make_results(model, grid, out, None, settings, given)
            return
        found = api.sweep(
            model,
            grid,
            out,
            settings=settings,
            **given,
            measured={"text": text, "windows": windows, "length": window_length, "speed": speed},
        )
    _show(console, found, failed, wide=wide)
    evaluate.save_reports(found.evaluation, report or [], overwrite=overwrite)
    evaluate.write_summary(summary, found.evaluation)
    _note_reports(console, report, summary)


def _place(model: str) -> Path:
    return Path(f"{Path(model.partition('@')[0]).name.removesuffix('.gguf')}-sweep")


def _note_reports(console: Console, reports: Sequence[Path] | None, summary: Path | None) -> None:
    for path in (*(reports or ()), *([summary] if summary else ())):
        console.note(f"report: {path}")


def _show(
    console: Console, found: Swept, failed: Sequence[processes.FailedProcess], *, wide: bool
) -> None:
    for name, why in found.left_out.items():
        console.note(f"{name} is left out: {why}")
    if console.as_json:
        console.document(
            {"schema": "quantforge.sweep/1", **found.document(), "failed_processes": failed}
        )
    else:
        evaluate.show_tables(console, found.evaluation, wide=wide)
        _note_results(console, found)


def _note_results(console: Console, found: Swept) -> None:
    """Say where the results are, and what is done with the closest of those that no other beats."""
    rows = found.evaluation.rows
    best = [rows[index]["path"] for index in found.evaluation.verdict.front]
    chosen = Path(best[-1]) if best else next(iter(found.results.values()))
    place = from_here(found.out)
    console.note(f"results: {len(found.results)} in {shown(place)}, under the names of their rows")
    console.note(f"next: quantforge generate {shlex.quote(str(place / chosen.name))}")


def _grid(over: list[str]) -> dict[str, list[str]]:
    """Return the values of every choice that is varied.

    Raises:
        UsageError: it has no values.
    """
    grid: dict[str, list[str]] = {}
    for text in over:
        option, separator, values = text.partition("=")
        name = option.strip().removeprefix("--").replace("-", "_")
        if not separator or not values:
            raise UsageError(f"--over {text}: no values", "write --over bits=3,4")
        grid.setdefault(name, []).extend(value.strip() for value in values.split(","))
    return grid
