"""``quantforge diff``: how two models differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from quantforge.cli import options
from quantforge.cli.completion import models
from quantforge.cli.console import Console

if TYPE_CHECKING:
    from quantforge.verification.difference import Difference

EXAMPLE = "Example: quantforge diff demo-awq-int4 demo-Q4_0.gguf"
DIFFERENT = 5
SHOWN = 20


def diff(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A model directory or a GGUF file.", autocompletion=models
        ),
    ],
    second: Annotated[
        str, typer.Argument(metavar="B", help="Another, of any format.", autocompletion=models)
    ],
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    json_progress: options.JsonProgress = False,
) -> None:
    """Compare two models: what was done, tensors, decoded values, files. Exit 5 if values or files differ."""
    console = Console(as_json=as_json, quiet=quiet or as_json, machine=json_progress)
    with console.watch():
        from quantforge import verbs

        found = verbs.diff(first, second, offline=offline, progress=console.show)
    if as_json:
        console.document(found.document())
    else:
        _show(console, found)
    if not found.equal:
        raise typer.Exit(DIFFERENT)


def _show(console: Console, found: Difference) -> None:
    for key, (one, other) in found.stated.items():
        console.text(f"{key}: {_short(one)} | {_short(other)}")
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
    if len(changed) > SHOWN:
        console.text(f"and {len(changed) - SHOWN} more, closer than these (--json lists all)")
    for name in found.files:
        console.text(f"file differs, or one has it alone: {name}")
    stored = len(found.tensors) - len(changed)
    console.text(
        f"{found.compared} tensors in both: {len(changed)} differ in value, {stored} only in how they are stored"
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
