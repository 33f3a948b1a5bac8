"""``quantforge sweep``: quantize with all combinations of some choices, and compare the results."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantforge.cli import choices, evaluate, options, processes
from quantforge.cli.console import Console
from quantforge.cli.path_arguments import display_path, relative_to_cwd
from quantforge.errors import UsageError

if TYPE_CHECKING:
    from quantforge.api import Swept

EXAMPLE = "Example: quantforge sweep demo --over bits=3,4 --over method=rtn,gptq"

VariedChoices = Annotated[
    list[str],
    typer.Option(
        "--over",
        metavar="CHOICE=VALUE,VALUE",
        help="What is varied: an option of quantize without its dashes (repeatable).",
    ),
]
OutputDirectory = Annotated[
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


@options.with_option_groups(
    recipe_options=choices.recipe_parameters(choices.RECIPE_OPTIONS),
    run_options=options.run_options(
        *options.DEVICE_OPTIONS,
        *options.PARALLEL_OPTIONS,
        *options.POLICY_OPTIONS,
        *options.DISPLAY_OPTIONS,
    ),
)
def sweep(
    model: options.Model,
    *,
    over: VariedChoices,
    output: OutputDirectory = None,
    recipe_options: options.OptionValues,
    text: evaluate.Text = None,
    windows: evaluate.WindowCount = 80,
    window_length: ScoredLength = 512,
    speed: Speed = False,
    report: evaluate.Reports = None,
    summary: evaluate.Summary = None,
    overwrite: Replace = False,
    wide: evaluate.Wide = False,
    run_options: options.OptionValues,
) -> None:
    """Quantize a model by all combinations of some choices, measure them, and mark those that no other beats.

    The same command goes on after any interruption. Combinations that cannot be made are left out and named, refused
    with --strict.
    """
    console = processes.console_from_options(run_options)
    evaluate.check_reports(report or [], summary, overwrite=overwrite)
    settings = processes.settings_from_options(run_options, console, overwrite=overwrite)
    grid, out = _parse_grid(over), output or _default_directory(model)
    with (
        console.progress_meter(),
        processes.worker_processes(run_options["jobs"], console.note) as failed_processes,
    ):
        from quantforge import api
        from quantforge.api.sweep import make_results

        if processes.is_silent():
            make_results(model, grid, out, None, settings, recipe_options)
            return
        sweep_result = api.sweep(
            model,
            grid,
            out,
            settings=settings,
            **recipe_options,
            measured={"text": text, "windows": windows, "length": window_length, "speed": speed},
        )
    _show(console, sweep_result, failed_processes, wide=wide)
    evaluate.save_reports(sweep_result.evaluation, report or [], overwrite=overwrite)
    evaluate.write_summary(summary, sweep_result.evaluation)
    _note_reports(console, report, summary)


def _default_directory(model: str) -> Path:
    return Path(f"{Path(model.partition('@')[0]).name.removesuffix('.gguf')}-sweep")


def _note_reports(console: Console, reports: Sequence[Path] | None, summary: Path | None) -> None:
    for path in (*(reports or ()), *([summary] if summary else ())):
        console.note(f"report: {path}")


def _show(
    console: Console,
    sweep_result: Swept,
    failed_processes: Sequence[processes.FailedProcess],
    *,
    wide: bool,
) -> None:
    for name, reason in sweep_result.left_out.items():
        console.note(f"{name} is left out: {reason}")
    if console.as_json:
        console.print_document(
            {
                "schema": "quantforge.sweep/2",
                **sweep_result.document(),
                "failed_processes": failed_processes,
            }
        )
    else:
        evaluate.show_tables(console, sweep_result.evaluation, wide=wide)
        _note_results(console, sweep_result)


def _note_results(console: Console, sweep_result: Swept) -> None:
    """Print where the results are, and a command for the closest one on the Pareto front."""
    rows = sweep_result.evaluation.rows
    best = [rows[index]["path"] for index in sweep_result.evaluation.verdict.pareto_front]
    example = Path(best[-1]) if best else next(iter(sweep_result.results.values()))
    directory = relative_to_cwd(sweep_result.out)
    console.note(
        f"results: {len(sweep_result.results)} in {display_path(directory)}, under the names of their rows"
    )
    console.note(f"next: quantforge generate {shlex.quote(str(directory / example.name))}")


def _parse_grid(over: list[str]) -> dict[str, list[str]]:
    """Parse ``--over CHOICE=VALUE,VALUE`` into values by choice.

    Raises:
        UsageError: a choice has no values.
    """
    grid: dict[str, list[str]] = {}
    for text in over:
        option, separator, values = text.partition("=")
        name = option.strip().removeprefix("--").replace("-", "_")
        if not separator or not values:
            raise UsageError(f"--over {text}: no values", "write --over bits=3,4")
        grid.setdefault(name, []).extend(value.strip() for value in values.split(","))
    return grid
