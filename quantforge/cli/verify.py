"""``quantforge verify``: check a quantized model, made by any tool."""

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
FAILED_EXIT_CODE, UNSUPPORTED_EXIT_CODE = 5, 4
MAX_LISTED = 5  # maximum number of findings listed for a check
# Advice for checks with many findings.
ADVICE = {
    "manifest": "fetch or make it again",
    "unreadable": "the files are damaged or incomplete: fetch them again",
    "incomplete": "is a file missing, or config.json that of another model?",
    "not-finite": "numbers overflowed or the file is damaged: make it again",
}
ADVICE_WITH_SOURCE = dict.fromkeys(
    ("unquantized-changed", "quantization-error", "group-error", "swapped-tensors"),
    "is --source the model that it was made from? A model that was quantized twice looks like this too",
)


@options.with_option_groups(
    run_options=options.run_options(*options.DEVICE_OPTIONS, *options.DISPLAY_OPTIONS)
)
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
            autocompletion=options.complete_from(TARGETS),
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
    run_options: options.OptionValues,
) -> None:
    """Check files, structure, every number and one forward pass; exit 5 and a list if anything is wrong."""
    console = processes.console_from_options(run_options)
    with console.progress_meter():
        from quantforge import api

        report = api.verify(
            path,
            source,
            engine=engine,
            forward=forward,
            device=run_options["device"],
            threads=run_options["threads"],
            key=key,
            adapter=adapter,
            offline=bool(run_options["offline"]),
            progress=console.show_progress,
        )
    if console.as_json:
        console.print_document(report.document(strict=strict))
    else:
        _show(console, report, strict=strict)
    if report.failed(strict=strict):
        raise typer.Exit(FAILED_EXIT_CODE)
    if report.unsupported:
        raise typer.Exit(UNSUPPORTED_EXIT_CODE)


def _show(console: Console, report: Report, *, strict: bool) -> None:
    """Print the findings, main figures, skipped checks and the verdict."""
    console.print_text(f"{report.path}  {report.model_type}  {report.format}".rstrip())
    for line in _finding_lines(
        report.findings, ADVICE | ADVICE_WITH_SOURCE if report.source else ADVICE
    ):
        (console.print_wrapped if console.is_terminal else console.print_text)(line)
    if report.tensors:
        noisiest = min(report.tensors, key=lambda row: float(row["snr_db"]))
        noisiest_text = f"the noisiest is {noisiest['name']} at {noisiest['snr_db']:.1f} dB ({noisiest['scheme']})"
        snr_text = "all equal" if noisiest["snr_db"] == math.inf else noisiest_text
        console.print_text(f"{len(report.tensors)} tensors compared; {snr_text}")
    if report.unrecorded_factors:
        console.print_text(
            f"unrecorded factors: {len(report.unrecorded_factors)} modules have factors that cancel out,"
            f" e.g. {report.unrecorded_factors[0]}"
        )
    if "kl_mean" in report.figures:
        text = f"KL divergence from the source: {report.figures['kl_mean']:.4g} nats per token"
        if "kl_rtn" in report.figures:
            text += f" (rounded plainly to the same types: {report.figures['kl_rtn']:.4g})"
        console.print_text(text)
    for text in report.notes:
        console.note(text)
    if report.partial:
        partial_checks = (f"{check} ({text})" for check, text in report.partial.items())
        console.note(f"checked in part, without a source: {', '.join(partial_checks)}")
    for reason in dict.fromkeys(report.skipped.values()):
        checks = [check for check, skip_reason in report.skipped.items() if skip_reason == reason]
        console.note(f"not checked ({reason}): {', '.join(checks)}")
    if report.unsigned:
        console.note(f"not covered by the signature: {', '.join(report.unsigned)}")
    console.print_text(_verdict_text(report, strict=strict))


def _finding_lines(
    findings: Sequence[Finding], advice_by_check: Mapping[str, str]
) -> Iterator[str]:
    """Yield a line for each finding, errors first; for a check with many, only `MAX_LISTED` and a count."""
    groups: dict[tuple[Severity, str], list[Finding]] = {}
    for item in sorted(findings, key=lambda item: [*Severity].index(item.severity)):
        groups.setdefault((item.severity, item.check), []).append(item)
    for (severity, check), items in groups.items():
        first_findings: dict[str, Finding] = {}
        for item in items:
            first_findings.setdefault(item.where, item)
        shown_findings = (
            items if len(items) <= MAX_LISTED else [*first_findings.values()][:MAX_LISTED]
        )
        for item in shown_findings:
            yield f"{severity}: {item.where}: {item.detail}"
        if len(items) > len(shown_findings):
            count_text = f"{len(items) - len(shown_findings)} more like these, {len(first_findings)} places in all"
            advice_text = f"; {advice_by_check[check]}" if check in advice_by_check else ""
            yield f"{severity}: {count_text} ({check}; --json lists all){advice_text}"


def _verdict_text(report: Report, *, strict: bool) -> str:
    """Return the last line of the report: verified, failed, or not verified."""
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
