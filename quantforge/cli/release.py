"""``quantforge release``: make, score and check many variants of one model, ready to be uploaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantforge.artifacts.number_text import size
from quantforge.cli import options, processes
from quantforge.cli.console import Console
from quantforge.files.disk import append_to_file, check_new_file
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
OutputDirectory = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        help="Directory to make or go on with (default: release of release.toml, x-release of x.toml).",
    ),
]
_HEADERS = ("variant", "format", "method", "files", "KL", "gates")


@options.with_option_groups(
    run_options=options.run_options(
        *options.DEVICE_OPTIONS,
        *options.PARALLEL_OPTIONS,
        *options.POLICY_OPTIONS,
        *options.DISPLAY_OPTIONS,
    )
)
def release(
    spec: Annotated[Path, typer.Argument(metavar="FILE", help="A release file (TOML).")],
    *,
    output: OutputDirectory = None,
    only: Only = None,
    budget: Budget = None,
    summary: Summary = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace variants that are not what would be made.")
    ] = False,
    provenance: options.Provenance = False,
    sign: options.Sign = None,
    dry_run: options.DryRun = False,
    run_options: options.OptionValues,
) -> None:
    """Make the variants that a file names, with one report, cards, checksums and upload commands.

    The same command goes on after any interruption. Exit 6 when a variant is beyond one of the file's gates.
    """
    console = processes.console_from_options(run_options)
    settings = processes.settings_from_options(
        run_options, console, overwrite=overwrite, provenance=provenance, sign=sign
    )
    if summary is not None:
        check_new_file(summary, "--summary", overwrite=True, appends=True)
    max_bytes = None if budget is None else int(typed_quantities.memory(budget, "--budget"))
    out = output or _default_directory(spec)
    if dry_run:
        _show_plan(console, spec, out, settings, only or (), max_bytes)
        return
    with (
        console.progress_meter(),
        processes.worker_processes(run_options["jobs"], console.note) as failed_processes,
    ):
        from quantforge import api

        released = api.release(spec, out, settings, only or (), max_bytes)
    if processes.is_silent():
        return
    _print_release(console, released, summary, failed_processes, settings)
    released.check_gates()


def _default_directory(spec: Path) -> Path:
    return Path(spec.stem if "release" in spec.stem else f"{spec.stem}-release")


def _print_release(
    console: Console,
    released: Released,
    summary: Path | None,
    failed_processes: Sequence[processes.FailedProcess],
    settings: Settings,
) -> None:
    """Print the variants of a release, and append them to the CI summary."""
    rows = [
        (
            variant.name,
            variant.format,
            variant.method,
            size(variant.weight_bytes),
            f"{variant.figures['kl_mean']:.4g}" if variant.figures else "-",
            "; ".join(variant.failed) or "kept",
        )
        for variant in released.variants
    ]
    if summary is not None:
        append_to_file(summary, _summary(rows, released).encode())
    if console.as_json:
        console.print_document(
            {
                "schema": "quantforge.released/2",
                **released.document(),
                "failed_processes": failed_processes,
            }
        )
    else:
        console.print_table(_HEADERS, rows)
        _note_left_out(console, released.left_out)
        kept_text = "made by other processes or kept" if settings.join else "kept"
        console.note(f"made {len(released.made)}, {kept_text} {len(rows) - len(released.made)}")
        console.note(f"to publish it: {released.upload}")


def _note_left_out(console: Console, sizes: Mapping[str, int]) -> None:
    for name, nbytes in sizes.items():
        console.note(f"{name} is left out: its files take {size(nbytes)}")


def _summary(rows: Sequence[Sequence[str]], released: Released) -> str:
    """Return a release as GitHub-flavored Markdown."""
    table = [_HEADERS, ["---"] * len(_HEADERS), *rows]
    lines = ["## Release", "", *("| " + " | ".join(line) + " |" for line in table), ""]
    reports = [
        FILES.text(path, CARD, released.out) for path in released.reports if path.suffix == ".md"
    ]
    return "\n".join([*lines, *reports, ""])


def _show_plan(
    console: Console,
    spec: Path,
    output: Path,
    settings: Settings,
    only: Sequence[str],
    budget: int | None,
) -> None:
    """Print what would be made, with all checks before the work; nothing is written."""
    from quantforge.api.release import plan_release
    from quantforge.plans import decisions, decisions_by_plan

    planned = plan_release(spec, output, settings, only, budget)
    plans = {name: job.planned.plan for name, job in planned.variants.jobs.items()}
    missing_names = planned.variants.missing
    rows = [
        {
            "name": name,
            "format": plan.format,
            "method": plan.method,
            "bytes": plan.output_bytes,
            "made": name not in missing_names,
            "decisions": decisions(plan),
        }
        for name, plan in plans.items()
    ]
    if console.as_json:
        console.print_document(
            {"schema": "quantforge.release-plan/1", "variants": rows, "left_out": planned.left_out}
        )
        return
    cells = [
        (
            name,
            plan.format,
            plan.method,
            size(plan.output_bytes),
            "to be made" if name in missing_names else "finished",
        )
        for name, plan in plans.items()
    ]
    console.print_table(("variant", "format", "method", "files", "state"), cells)
    for text in decisions_by_plan(plans):
        console.note(text)
    _note_left_out(console, planned.left_out)
