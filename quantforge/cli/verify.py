"""``quantforge verify``: check a quantized model, whoever made it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantforge.cli import options, processes
from quantforge.cli.console import Console
from quantforge.engines import TARGETS
from quantforge.verification.findings import Severity

if TYPE_CHECKING:
    from quantforge.verification.findings import Finding, Report

EXAMPLE = "Example: quantforge verify demo-gptq-int4 --source demo"
FAILED, UNSUPPORTED = 5, 4
SHOWN = 5  # findings of a check
# What to look at where a check finds something in many places.
ADVICE = {
    "manifest": "fetch or make it again",
    "unreadable": "the files are damaged or incomplete: fetch them again",
    "incomplete": "is a file missing, or config.json that of another model?",
    "not-finite": "numbers overflowed or the file is damaged: make it again",
}
WITH_SOURCE = dict.fromkeys(
    ("kept-changed", "noise", "groups", "swapped"),
    "is --source the model that it was made from? A model that was quantized twice looks like this too",
)


@options.takes(run=options.run_options(*options.WHERE, *options.SHOWN))
def verify(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A model directory or a GGUF file."),
    ],
    source: options.Source = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="ENGINE",
            autocompletion=options.among(TARGETS),
            help="Check that this engine loads it.",
        ),
    ] = None,
    forward: Annotated[
        bool, typer.Option("--forward/--no-forward", help="Run the model once.")
    ] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too (exit 5).")] = False,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key", metavar="FILE", help="Check the signature with this public key (PEM)."
        ),
    ] = None,
    adapter: options.Adapter = None,
    *,
    run: options.Given,
) -> None:
    """Check files, structure, every number and one forward pass; exit 5 and a list if anything is wrong."""
    console = processes.console_of(run)
    with console.watch():
        from quantforge import api

        report = api.verify(
            path,
            source,
            engine=engine,
            forward=forward,
            device=run["device"],
            threads=run["threads"],
            key=key,
            adapter=adapter,
            offline=bool(run["offline"]),
            progress=console.show,
        )
    if console.as_json:
        console.document(report.document(strict=strict))
    else:
        _show(console, report, strict=strict)
    if report.failed(strict=strict):
        raise typer.Exit(FAILED)
    if report.unsupported:
        raise typer.Exit(UNSUPPORTED)


def _show(console: Console, report: Report, *, strict: bool) -> None:
    """Print the findings, the main figures, what was not checked, and the verdict."""
    console.text(f"{report.path}  {report.model_type}  {report.format}".rstrip())
    for line in _listed(report.findings, ADVICE | WITH_SOURCE if report.source else ADVICE):
        (console.wrapped if console.terminal else console.text)(line)
    if report.tensors:
        worst = min(report.tensors, key=lambda row: float(row["snr_db"]))
        noisiest = (
            f"the noisiest is {worst['name']} at {worst['snr_db']:.1f} dB ({worst['scheme']})"
        )
        found = "all equal" if worst["snr_db"] == math.inf else noisiest
        console.text(f"{len(report.tensors)} tensors compared; {found}")
    if report.unrecorded_factors:
        console.text(
            f"unrecorded factors: {len(report.unrecorded_factors)} modules have factors that cancel out,"
            f" e.g. {report.unrecorded_factors[0]}"
        )
    if "kl_mean" in report.figures:
        text = f"KL divergence from the source: {report.figures['kl_mean']:.4g} nats per token"
        if "kl_plain" in report.figures:
            text += f" (rounded plainly to the same types: {report.figures['kl_plain']:.4g})"
        console.text(text)
    for text in report.notes:
        console.note(text)
    if report.partial:
        seen = (f"{check} ({text})" for check, text in report.partial.items())
        console.note(f"checked in part, without a source: {', '.join(seen)}")
    for reason in dict.fromkeys(report.skipped.values()):
        checks = [check for check, why in report.skipped.items() if why == reason]
        console.note(f"not checked ({reason}): {', '.join(checks)}")
    if report.unsigned:
        console.note(f"not covered by the signature: {', '.join(report.unsigned)}")
    console.text(_verdict(report, strict=strict))


def _listed(findings: Sequence[Finding], advice: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each finding, errors first; of a check with many, `SHOWN` places and the number of the rest."""
    groups: dict[tuple[Severity, str], list[Finding]] = {}
    for item in sorted(findings, key=lambda item: [*Severity].index(item.severity)):
        groups.setdefault((item.severity, item.check), []).append(item)
    for (severity, check), items in groups.items():
        places: dict[str, Finding] = {}
        for item in items:
            places.setdefault(item.where, item)
        shown = items if len(items) <= SHOWN else [*places.values()][:SHOWN]
        for item in shown:
            yield f"{severity}: {item.where}: {item.detail}"
        if len(items) > len(shown):
            more = f"{len(items) - len(shown)} more like these, {len(places)} places in all"
            then = f"; {advice[check]}" if check in advice else ""
            yield f"{severity}: {more} ({check}; --json lists all){then}"


def _verdict(report: Report, *, strict: bool) -> str:
    """Return the last line: verified, failed, or not verified."""
    counts = [
        f"{count} {severity}{'s' * (count != 1)}"
        for severity in Severity
        if (count := report.count(severity))
    ]
    if report.failed(strict=strict):
        return f"{', '.join(counts)}: failed"
    if report.unsupported:
        return f"not verified: {report.unsupported}"
    extent = ": structure only" if report.structure_only else ""
    return f"verified{extent}{f', with {counts[0]}' if counts else ''}"
