"""``quantforge verify``: look at a finished artifact, ours or anyone's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantforge.cli import options
from quantforge.cli.completion import OF_CHOICES, models
from quantforge.cli.console import Console
from quantforge.cli.diff import SHOWN

if TYPE_CHECKING:
    from quantforge.verification.findings import Finding, Report

EXAMPLE = "Example: quantforge verify demo-gptq-int4 --source demo"
FAILED, UNJUDGED = 5, 4


def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A model directory or a GGUF file.", autocompletion=models
        ),
    ],
    source: options.Source = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="ENGINE",
            autocompletion=OF_CHOICES["engine"],
            help="An engine that has to load it.",
        ),
    ] = None,
    forward: Annotated[
        bool, typer.Option("--forward/--no-forward", help="Run the model once.")
    ] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings are failures too.")] = False,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key", metavar="FILE", help="Public key (PEM) that the signature has to be of."
        ),
    ] = None,
    adapter: options.Adapter = None,
    device: options.Device = "cpu",
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    json_progress: options.JsonProgress = False,
) -> None:
    """Check files, structure, every number and one forward pass; exit 5 and a list if anything is wrong."""
    console = Console(as_json=as_json, quiet=quiet or as_json, machine=json_progress)
    with console.watch():
        from quantforge import verbs

        report = verbs.verify(
            path,
            source,
            engine=engine,
            forward=forward,
            device=device,
            key=key,
            adapter=adapter,
            offline=offline,
            progress=console.show,
        )
    if as_json:
        console.document(report.document(strict=strict))
    else:
        _show(console, report, strict=strict)
    if report.failed(strict=strict):
        raise typer.Exit(FAILED)
    if report.unjudged:
        raise typer.Exit(UNJUDGED)


def _show(console: Console, report: Report, *, strict: bool) -> None:
    """Print the findings for people, and what was not looked at."""
    console.text(f"{report.path}  {report.model_type}  {report.format}".rstrip())
    for line in _listed(report.findings):
        console.text(line)
    if report.tensors:
        worst = min(report.tensors, key=lambda row: float(row["snr_db"]))
        noisiest = (
            f"the noisiest is {worst['name']} at {worst['snr_db']:.1f} dB ({worst['scheme']})"
        )
        found = "all equal" if worst["snr_db"] == math.inf else noisiest
        console.text(f"{len(report.tensors)} tensors compared; {found}")
    if report.tuned:
        console.text(
            f"tuned: {len(report.tuned)} modules carry factors that nothing records and that cancel,"
            f" e.g. {report.tuned[0]}"
        )
    if "kl_mean" in report.figures:
        text = f"{report.figures['kl_mean']:.4g} nats per token from the source"
        if "kl_predicted" in report.figures:
            text += (
                f", {report.figures['kl_predicted']:.4g} predicted from the errors of its tensors"
            )
        console.text(text)
    for text in report.notes:
        console.note(text)
    for reason in dict.fromkeys(report.skipped.values()):
        checks = [check for check, why in report.skipped.items() if why == reason]
        console.note(f"not checked ({reason}): {', '.join(checks)}")
    if report.unsigned:
        console.note(f"not covered by the signature: {', '.join(report.unsigned)}")
    failed = report.failed(strict=strict)
    sound = "verified: structure only" if report.structure_only else "verified"
    if report.unjudged:
        sound = f"not judged: {report.unjudged}"
    console.text(f"{len(report.findings)} finding(s): failed" if failed else sound)


def _listed(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a line for each finding, for each kind at most `SHOWN` and then how many more there are."""
    met: Counter[str] = Counter()
    for item in findings:
        kind = f"{item.severity}: {item.check}"
        met[kind] += 1
        if met[kind] <= SHOWN:
            yield f"{kind}: {item.where}: {item.detail}"
    for kind, count in met.items():
        if count > SHOWN:
            yield f"{kind}: {count - SHOWN} more (--json lists all)"
