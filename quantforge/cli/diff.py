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
DIFFERENT = 5
SHOWN = 20
DIGEST, DIGITS = re.compile("[0-9a-f]{64}"), 12  # of a digest, enough to tell it from another
SIDES = ("first", "second")


@options.takes(run=options.run_options("offline", *options.SHOWN))
def diff(
    first: Annotated[
        str,
        typer.Argument(metavar="A", help="A model directory or a GGUF file."),
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="Another, of any format.")],
    *,
    run: options.Given,
) -> None:
    """Compare two models: what was done, tensors, decoded values, files. Exit 5 if values or files differ.

    Files are those that a model carries beside its weights, config.json but for how weights are stored, and of two GGUF
    files every byte; not the card README.md, nor the manifest.
    """
    console = processes.console_of(run)
    with console.watch():
        from quantforge import api

        found = api.diff(first, second, offline=bool(run["offline"]), progress=console.show)
    if console.as_json:
        console.document(found.document())
    else:
        _show(console, found)
    if not found.equal:
        console.note(f"not the same: exit code {DIFFERENT}")
        raise typer.Exit(DIFFERENT)


def _show(console: Console, found: Difference) -> None:
    console.text(f"first: {found.first}\nsecond: {found.second}")
    for line in _stated(found.stated, found.unstated):
        console.text(line)
    for side, names in found.only.items():
        for name in names[:SHOWN]:
            console.text(f"only in the {side}: {name}")
        if len(names) > SHOWN:
            console.text(f"only in the {side}: {len(names) - SHOWN} more (--json lists all)")
    ranked = sorted(found.tensors.items(), key=lambda item: item[1])
    changed = [(name, value) for name, value in ranked if value != math.inf]
    rows = [(name, f"{value:.1f}") for name, value in changed[:SHOWN]]
    if rows:
        console.table(("tensor", "dB"), rows)
        console.text("dB: signal to noise of the decoded values, larger is closer")
    if len(changed) > SHOWN:
        console.text(f"and {len(changed) - SHOWN} more, closer than these (--json lists all)")
    lone = {name: f"only the {side} has" for side, names in found.alone.items() for name in names}
    for name in found.files:
        console.text(f"{lone.get(name, 'differs:')} the file {name}")
    if found.uncompared:
        console.wrapped(
            f"not compared, since a GGUF file holds no such files: {', '.join(found.uncompared)}"
        )
    stored = len(found.tensors) - len(changed)
    console.text(
        f"{found.compared} tensors in both: {len(changed)} differ in value, {stored} only in how they are stored"
    )


def _stated(stated: Mapping[str, list[Any]], unstated: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield what the two state differently; a line for all of a manifest or a recipe that one of them has alone."""
    told = set()
    for key, (one, other) in stated.items():
        kind = key.partition(".")[0]
        missing = [side for side in SIDES if kind in unstated.get(side, ())]
        if not missing:
            fields = [*_fields(key, one, other)]
            yield from fields[:SHOWN]
            if len(fields) > SHOWN:
                yield f"{key}: {len(fields) - SHOWN} more fields differ (--json lists all)"
        elif kind not in told:
            told.add(kind)
            yield f"{kind}: the {missing[0]} has none, so what was done cannot be compared"


def _fields(name: str, one: object, other: object) -> Iterator[str]:
    """Yield a line for every field that differs, of a table for each of its fields."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        yield f"{name}: {_short(one)} | {_short(other)}"
        return
    for key in dict.fromkeys((*one, *other)):
        if one.get(key) != other.get(key):
            yield from _fields(f"{name}, {key}", one.get(key), other.get(key))


def _short(value: object) -> str:
    text = "not stated" if value is None else _words(value)
    if DIGEST.fullmatch(text):
        return text[:DIGITS]
    return text if len(text) <= 60 else f"{text[:57]}..."


def _words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value)) or "none"
    return str(value)
