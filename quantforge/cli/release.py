"""``quantforge release``: many recipes of one model, scored, gated and laid out to be uploaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantforge.artifacts.number_text import size
from quantforge.cli import options, processes
from quantforge.cli.console import Console
from quantforge.files.disk import append, check_new
from quantforge.files.opener import FILES
from quantforge.planning import typed_quantities
from quantforge_files.roles import CARD

if TYPE_CHECKING:
    from quantforge.api import Released
    from quantforge.settings import Settings

EXAMPLE = "Example: quantforge release release.toml --dry-run"

Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="This variant alone (repeatable)."),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="SIZE",
        help="Leave out variants whose files take more, as 8GB or 8GiB.",
    ),
]
Summary = Annotated[
    Path | None,
    typer.Option(
        "--summary",
        metavar="FILE",
        help="Also add variants, gates and report to FILE as Markdown: a CI's job summary.",
    ),
]
Place = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        help="Directory to make or go on with (default: release of release.toml, x-release of x.toml).",
    ),
]
_HEADERS = ("variant", "format", "method", "files", "KL", "gates")


@options.takes(
    run=options.run_options(*options.WHERE, *options.SHARED, *options.ACCEPTED, *options.SHOWN)
)
def release(
    spec: Annotated[Path, typer.Argument(metavar="FILE", help="A release file (TOML).")],
    *,
    output: Place = None,
    only: Only = None,
    budget: Budget = None,
    summary: Summary = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace variants that are not what would be made.")
    ] = False,
    provenance: options.Provenance = False,
    sign: options.Sign = None,
    dry_run: options.DryRun = False,
    run: options.Given,
) -> None:
    """Make the variants that a file names, with one report, cards, checksums and upload commands.

    The same command goes on after any interruption. Exit 6 when a variant is beyond one of the file's gates.
    """
    console = processes.console_of(run)
    settings = processes.settings_of(
        run, console, overwrite=overwrite, provenance=provenance, sign=sign
    )
    if summary is not None:
        check_new(summary, "--summary", overwrite=True, adds=True)
    most = None if budget is None else int(typed_quantities.memory(budget, "--budget"))
    out = output or _place(spec)
    if dry_run:
        _show_plan(console, spec, out, settings, only or (), most)
        return
    with console.watch(), processes.started(run["jobs"], console.note) as failed:
        from quantforge import api

        made = api.release(spec, out, settings, only or (), most)
    if processes.silent():
        return
    _report(console, made, summary, failed, settings)
    made.check_gates()


def _place(spec: Path) -> Path:
    return Path(spec.stem if "release" in spec.stem else f"{spec.stem}-release")


def _report(
    console: Console,
    made: Released,
    summary: Path | None,
    failed: Sequence[processes.FailedProcess],
    settings: Settings,
) -> None:
    """Say what a release consists of, in the job's summary too."""
    rows = [
        (
            one.name,
            one.format,
            one.method,
            size(one.weight_bytes),
            f"{one.figures['kl_mean']:.4g}" if one.figures else "-",
            "; ".join(one.failed) or "kept",
        )
        for one in made.variants
    ]
    if summary is not None:
        append(summary, _summary(rows, made).encode())
    if console.as_json:
        console.document(
            {"schema": "quantforge.released/1", **made.document(), "failed_processes": failed}
        )
    else:
        console.table(_HEADERS, rows)
        _note_left_out(console, made.left_out)
        others = "made by other processes or kept" if settings.join else "kept"
        console.note(f"made {len(made.made)}, {others} {len(rows) - len(made.made)}")
        console.note(f"to publish it: {made.upload}")


def _note_left_out(console: Console, sizes: Mapping[str, int]) -> None:
    for name, nbytes in sizes.items():
        console.note(f"{name} is left out: its files take {size(nbytes)}")


def _summary(rows: Sequence[Sequence[str]], made: Released) -> str:
    """Return a release as GitHub-flavoured Markdown."""
    table = [_HEADERS, ["---"] * len(_HEADERS), *rows]
    lines = ["## Release", "", *("| " + " | ".join(line) + " |" for line in table), ""]
    reports = [FILES.text(one, CARD, made.out) for one in made.reports if one.suffix == ".md"]
    return "\n".join([*lines, *reports, ""])


def _show_plan(
    console: Console,
    spec: Path,
    output: Path,
    settings: Settings,
    only: Sequence[str],
    budget: int | None,
) -> None:
    """Show what would be made, with all that is refused before the work; nothing is written."""
    from quantforge.api.release import plan_release
    from quantforge.plans import decisions, decisions_by_plan

    planned = plan_release(spec, output, settings, only, budget)
    plans = {name: job.planned.plan for name, job in planned.variants.jobs.items()}
    missing = planned.variants.missing
    rows = [
        {
            "name": name,
            "format": plan.format,
            "method": plan.method,
            "bytes": plan.output_bytes,
            "made": name not in missing,
            "decisions": decisions(plan),
        }
        for name, plan in plans.items()
    ]
    if console.as_json:
        console.document(
            {"schema": "quantforge.release-plan/1", "variants": rows, "left_out": planned.left_out}
        )
        return
    cells = [
        (
            name,
            plan.format,
            plan.method,
            size(plan.output_bytes),
            "to be made" if name in missing else "finished",
        )
        for name, plan in plans.items()
    ]
    console.table(("variant", "format", "method", "files", "state"), cells)
    for said in decisions_by_plan(plans):
        console.note(said)
    _note_left_out(console, planned.left_out)
