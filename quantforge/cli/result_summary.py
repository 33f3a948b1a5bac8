"""Print the summary of a new result: size, events, and commands to evaluate and publish it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.artifacts import manifest
from quantforge.artifacts.number_text import size
from quantforge.cli.console import Console
from quantforge.cli.path_arguments import adapter_arguments, relative_to_cwd
from quantforge.engines import with_output_path
from quantforge.files.hub import repository_name
from quantforge.files.output_names import MODELFILE_SUFFIX, projector_name
from quantforge.planning.coverage import coverage
from quantforge.planning.format_choice import format_from_filename
from quantforge.plans import NoteKind, kind_of

if TYPE_CHECKING:
    from quantforge.api import Exported, Outcome
    from quantforge.events import Event


# Kinds of notes of a plan that are printed again with its result.
_REPEATED_NOTES = {
    NoteKind.SOURCE, NoteKind.EMBEDDING, NoteKind.TEMPLATE, NoteKind.ENGINE, NoteKind.SERVE,
}  # fmt: skip


def show_quantized(console: Console, outcome: Outcome, model: str, seconds: float) -> None:
    """Print the result of `quantize` and the next commands; ``model`` is the argument as typed."""
    plan = outcome.plan
    counts = dict(sorted(Counter(event.kind for event in outcome.events).items()))
    if console.as_json:
        console.print_document(
            {
                "schema": "quantforge.quantize/2",
                "path": str(outcome.out),
                "method": plan.method,
                "format": plan.format,
                "bits_per_weight": plan.bits_per_weight,
                "bits_per_weight_in_blocks": plan.bits_per_weight_in_blocks,
                "bits_per_weight_total": plan.bits_per_weight_total,
                "quantized_share_in_blocks": coverage(plan.tensors).share,
                "output_bytes": plan.output_bytes,
                "resumed": outcome.resumed,
                "event_counts": counts,
                "not_copied": plan.not_copied,
                "events": [event.to_json() for event in outcome.events],
                "seconds": seconds,
            }
        )
        return
    if outcome.resumed:
        console.note("resumed: the parts that an earlier run had finished were kept")
    out = relative_to_cwd(outcome.out)
    console.print_text(str(out))
    console.note(
        f"{plan.method} -> {plan.format}: {plan.density}, files {size(plan.output_bytes)}, {seconds:.0f} s"
    )
    if outcome.scaled_activations is not None:
        num_scaled, num_searched = outcome.scaled_activations
        console.note(
            f"columns scaled for {num_scaled} of {num_searched} activations; no factors were better elsewhere"
        )
    console.note(str(coverage(plan.tensors)))
    for note in plan.notes:
        if kind_of(note) in _REPEATED_NOTES:
            console.note(with_output_path(note, out))
    for note in plan.not_copied:
        console.note(note)
    _print_events(console, outcome.events)
    not_read_back = [note for note in plan.notes if kind_of(note) is NoteKind.NOT_READ_BACK]
    for note in not_read_back:
        console.note(note)
    if not not_read_back:
        eval_command = f"quantforge eval {shlex.quote(model)} {shlex.quote(str(out))}"
        console.note(f"next: {eval_command}{adapter_arguments(outcome.adapter)}")
    console.note(upload_hint(out))


def show_exported(console: Console, result: Exported) -> None:
    """Print the result of `export`, with how exact the conversion is."""
    if console.as_json:
        console.print_document({"schema": "quantforge.export/2", **result.document()})
        return
    out = relative_to_cwd(result.out)
    console.print_text(str(out))
    console.note(
        f"{result.source_format} -> {result.format}: {result.layers} layers, {result.verdict},"
        f" files {size(result.output_bytes)}"
    )
    if result.coverage is not None:
        console.note(str(result.coverage))
    _print_events(console, result.events)
    for note in result.notes:
        if kind_of(note) is not NoteKind.CHOICE:  # shown before the work
            console.note(with_output_path(note, out))
    console.note(upload_hint(out))


def upload_hint(out: Path) -> str:
    """Return the command that uploads a result to the hub: a directory, or a file with its side files.

    The repository has the name of the result; for a file, without its type.
    """
    if not format_from_filename(out):
        command = (
            f"to publish it: hf upload ORG/{repository_name(out.name)} {shlex.quote(str(out))} ."
        )
        if (manifest.read_manifest(out) or {}).get("base_model"):
            return command
        return f"{command}\nits card names no base_model: --base-model ORG/NAME states one"
    weights = out.name if out.is_file() else f"{out.stem}-*-of-*{out.suffix}"
    names = (f"{out.stem}{MODELFILE_SUFFIX}", projector_name(out))
    extra_names = [text for text in names if out.with_name(text).exists()]
    patterns = (
        f"--include {shlex.quote(text)}" for text in (weights, f"{out.name}.*", *extra_names)
    )
    repository = repository_name(f"{out.stem}-GGUF")
    directory = shlex.quote(str(out.parent))
    return f"to publish it: hf upload ORG/{repository} {directory} . {' '.join(patterns)}"


def _print_events(console: Console, events: Sequence[Event]) -> None:
    """Print how often each kind of event occurred, with the first one."""
    for kind, count in sorted(Counter(event.kind for event in events).items()):
        first = next(event for event in events if event.kind == kind)
        console.note(f"event {kind} x{count}: {first.where}: {first.detail}")
