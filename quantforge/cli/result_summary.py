"""What is said of a result that was made: what it is, what happened to it, how it is measured and published."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.artifacts import manifest
from quantforge.artifacts.number_text import size
from quantforge.cli.console import Console
from quantforge.cli.path_arguments import from_here, typed_adapter
from quantforge.engines import with_output_path
from quantforge.files.hub import repository_name
from quantforge.files.output_names import MODELFILE, projector_name
from quantforge.planning.coverage import coverage
from quantforge.planning.format_choice import format_from_filename
from quantforge.plans import NoteKind, kind_of

if TYPE_CHECKING:
    from quantforge.api import Exported, Outcome
    from quantforge.events import Event


# Kinds of notes of a plan that are repeated beside its result.
_SHOWN = {
    NoteKind.SOURCE, NoteKind.EMBEDDING, NoteKind.TEMPLATE, NoteKind.ENGINE, NoteKind.SERVE,
}  # fmt: skip


def show_quantized(console: Console, outcome: Outcome, model: str, seconds: float) -> None:
    """Say what was made of a model, as it was typed, and what to do next."""
    plan = outcome.plan
    counts = dict(sorted(Counter(event.kind for event in outcome.events).items()))
    if console.as_json:
        console.document(
            {
                "schema": "quantforge.quantize/1",
                "path": str(outcome.out),
                "method": plan.method,
                "format": plan.format,
                "bits_per_weight": plan.bits_per_weight,
                "bits_per_weight_in_blocks": plan.bits_per_weight_in_blocks,
                "bits_per_weight_total": plan.bits_per_weight_total,
                "block_share_quantized": coverage(plan.tensors).share,
                "output_bytes": plan.output_bytes,
                "resumed": outcome.resumed,
                "event_counts": counts,
                "left_behind": plan.left_behind,
                "events": [event.to_json() for event in outcome.events],
                "seconds": seconds,
            }
        )
        return
    if outcome.resumed:
        console.note("resumed: the parts that an earlier run had finished were kept")
    out = from_here(outcome.out)
    console.text(str(out))
    console.note(
        f"{plan.method} -> {plan.format}: {plan.density}, files {size(plan.output_bytes)}, {seconds:.0f} s"
    )
    if outcome.scaled is not None:
        found, searched = outcome.scaled
        console.note(
            f"columns scaled for {found} of {searched} activations; no factors were better elsewhere"
        )
    console.note(str(coverage(plan.tensors)))
    for note in plan.notes:
        if kind_of(note) in _SHOWN:
            console.note(with_output_path(note, out))
    for note in plan.left_behind:
        console.note(note)
    _list_events(console, outcome.events)
    not_read_back = [note for note in plan.notes if kind_of(note) is NoteKind.NOT_READ_BACK]
    for note in not_read_back:
        console.note(note)
    if not not_read_back:
        compared = f"quantforge eval {shlex.quote(model)} {shlex.quote(str(out))}"
        console.note(f"next: {compared}{typed_adapter(outcome.adapter)}")
    console.note(upload(out))


def show_exported(console: Console, result: Exported) -> None:
    """Say what was made, and how exactly it is what was given."""
    if console.as_json:
        console.document({"schema": "quantforge.export/1", **result.document()})
        return
    out = from_here(result.out)
    console.text(str(out))
    console.note(
        f"{result.source_format} -> {result.format}: {result.layers} layers, {result.verdict},"
        f" files {size(result.output_bytes)}"
    )
    if result.coverage is not None:
        console.note(str(result.coverage))
    _list_events(console, result.events)
    for note in result.notes:
        if kind_of(note) is not NoteKind.CHOICE:  # shown before the work
            console.note(with_output_path(note, out))
    console.note(upload(out))


def upload(out: Path) -> str:
    """Return how a result is published on the hub: a directory as it is, of a file what belongs to it.

    The repository is called as the result is; of a file, as the result without its type.
    """
    if not format_from_filename(out):
        said = f"to publish it: hf upload ORG/{repository_name(out.name)} {shlex.quote(str(out))} ."
        if (manifest.read_manifest(out) or {}).get("base_model"):
            return said
        return f"{said}\nits card names no base_model: --base-model ORG/NAME states one"
    weights = out.name if out.is_file() else f"{out.stem}-*-of-*{out.suffix}"
    names = (f"{out.stem}{MODELFILE}", projector_name(out))
    extra = [text for text in names if out.with_name(text).exists()]
    chosen = (f"--include {shlex.quote(text)}" for text in (weights, f"{out.name}.*", *extra))
    repository = repository_name(f"{out.stem}-GGUF")
    place = shlex.quote(str(out.parent))
    return f"to publish it: hf upload ORG/{repository} {place} . {' '.join(chosen)}"


def _list_events(console: Console, events: Sequence[Event]) -> None:
    """Say how often each kind occurred, and where first."""
    for kind, count in sorted(Counter(event.kind for event in events).items()):
        first = next(event for event in events if event.kind == kind)
        console.note(f"event {kind} x{count}: {first.where}: {first.detail}")
