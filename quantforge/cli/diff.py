"""``quantforge diff``: how two models differ."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantforge.cli import options, processes
from quantforge.cli.console import Console

if TYPE_CHECKING:
    from quantforge.verification.difference import Difference

EXAMPLE = "Example: quantforge diff demo-rtn-int4 demo-gptq-int4"
DIFFERENT_EXIT_CODE = 5
MAX_LISTED = 20
DIGEST, SHORT_DIGEST = re.compile("[0-9a-f]{64}"), 12  # digits of a digest that are shown
SIDES = ("first", "second")


@options.with_option_groups(run_options=options.run_options("offline", *options.DISPLAY_OPTIONS))
def diff(
    first: Annotated[
        str,
        typer.Argument(metavar="A", help="A model directory or a GGUF file."),
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="Another, of any format.")],
    *,
    run_options: options.OptionValues,
) -> None:
    """Compare two models: what was done, tensors, decoded values, files. Exit 5 if values or files differ.

    Files are those that a model carries beside its weights, config.json but for how weights are stored, and of two GGUF
    files every byte; not the card README.md, nor the manifest.
    """
    console = processes.console_from_options(run_options)
    with console.progress_meter():
        from quantforge import api

        difference = api.diff(
            first, second, offline=bool(run_options["offline"]), progress=console.show_progress
        )
    if console.as_json:
        console.print_document(difference.document())
    else:
        _show(console, difference)
    if not difference.equal:
        console.note(f"not the same: exit code {DIFFERENT_EXIT_CODE}")
        raise typer.Exit(DIFFERENT_EXIT_CODE)


def _show(console: Console, difference: Difference) -> None:
    console.print_text(f"first: {difference.first}\nsecond: {difference.second}")
    for line in _metadata_lines(difference.recorded_differences, difference.missing_records):
        console.print_text(line)
    for side, names in difference.unmatched_tensors.items():
        for name in names[:MAX_LISTED]:
            console.print_text(f"only in the {side}: {name}")
        if len(names) > MAX_LISTED:
            console.print_text(
                f"only in the {side}: {len(names) - MAX_LISTED} more (--json lists all)"
            )
    ranked = sorted(difference.tensors.items(), key=lambda item: item[1])
    changed = [(name, value) for name, value in ranked if value != math.inf]
    rows = [(name, f"{value:.1f}") for name, value in changed[:MAX_LISTED]]
    if rows:
        console.print_table(("tensor", "dB"), rows)
        console.print_text("dB: signal to noise of the decoded values, larger is closer")
    if len(changed) > MAX_LISTED:
        console.print_text(
            f"and {len(changed) - MAX_LISTED} more, closer than these (--json lists all)"
        )
    only_texts = {
        name: f"only the {side} has"
        for side, names in difference.unmatched_files.items()
        for name in names
    }
    for name in difference.files:
        console.print_text(f"{only_texts.get(name, 'differs:')} the file {name}")
    if difference.uncompared:
        console.print_wrapped(
            f"not compared, since a GGUF file holds no such files: {', '.join(difference.uncompared)}"
        )
    restored = len(difference.tensors) - len(changed)
    console.print_text(
        f"{difference.compared} tensors in both: {len(changed)} differ in value, {restored} only in how they are stored"
    )


def _metadata_lines(
    differing: Mapping[str, list[Any]], missing_sections: Mapping[str, list[str]]
) -> Iterator[str]:
    """Yield lines about differing metadata, and one line for a manifest or recipe that only one model has."""
    reported = set()
    for key, (first_value, second_value) in differing.items():
        section = key.partition(".")[0]
        missing_sides = [side for side in SIDES if section in missing_sections.get(side, ())]
        if not missing_sides:
            fields = [*_differing_fields(key, first_value, second_value)]
            yield from fields[:MAX_LISTED]
            if len(fields) > MAX_LISTED:
                yield f"{key}: {len(fields) - MAX_LISTED} more fields differ (--json lists all)"
        elif section not in reported:
            reported.add(section)
            yield f"{section}: the {missing_sides[0]} has none, so what was done cannot be compared"


def _differing_fields(name: str, first: object, second: object) -> Iterator[str]:
    """Yield a line for every field that differs, recursively for tables."""
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        yield f"{name}: {_short_text(first)} | {_short_text(second)}"
        return
    for key in dict.fromkeys((*first, *second)):
        if first.get(key) != second.get(key):
            yield from _differing_fields(f"{name}, {key}", first.get(key), second.get(key))


def _short_text(value: object) -> str:
    text = "not stated" if value is None else _value_text(value)
    if DIGEST.fullmatch(text):
        return text[:SHORT_DIGEST]
    return text if len(text) <= 60 else f"{text[:57]}..."


def _value_text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value_text(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_value_text, value)) or "none"
    return str(value)
