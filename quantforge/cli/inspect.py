"""``quantforge inspect``: what is in a model, from headers alone."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantforge.artifacts.number_text import size
from quantforge.cli import options
from quantforge.cli.console import Console

if TYPE_CHECKING:
    from quantforge.plans import FileTensorInfo

EXAMPLE = "Example: quantforge inspect demo-gptq-int4 --tensors '*.layers.0.*'"


def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A directory, a file, or org/name.")],
    tensors: Annotated[
        str | None,
        typer.Option("--tensors", metavar="[GLOB]", help="List tensors: those that match, or all."),
    ] = None,
    derive: Annotated[
        bool,
        typer.Option(
            "--derive",
            help="Run one block of each kind: what reads the same activation, what absorbs.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="With --derive: write it here, as JSON."
        ),
    ] = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
) -> None:
    """Show schemes, bits per weight, sizes and provenance of any safetensors model, GGUF file or importance matrix."""
    from quantforge import api
    from quantforge.errors import UsageError

    console = Console(as_json=as_json)
    if derive:
        if tensors is not None:
            raise UsageError("--tensors and --derive: two questions", "leave one out")
        declared = api.derive_declarations(path, output, offline=offline).document()
        _show(console, declared)
        return
    if output is not None:
        raise UsageError("-o is for --derive", "leave one out, or add the other")
    found = api.inspect(path, offline=offline)
    if tensors is not None:
        found = replace(found, tensors=_matching(found.tensors, tensors))
    if as_json:
        console.document(found.document())
        return
    if tensors is not None:
        rows = [
            (t.name, t.dtype, "x".join(map(str, t.shape)), size(t.nbytes)) for t in found.tensors
        ]
        console.table(("tensor", "type", "shape", "bytes"), rows)
        return
    console.text(f"{found.path}  {found.model_type}  {found.format}".rstrip())
    held = f"{found.weights:,} weights, {found.bits_per_weight:.4f} bits per weight; weights "
    held = held if found.weights else "values "
    console.text(f"{held}{size(found.tensor_bytes)}, files {size(found.file_bytes)}")
    if found.quantized_weights:
        console.text(
            f"{found.quantized_weights:,} of them quantized,"
            f" {found.bits_per_quantized_weight:.4f} bits per quantized weight"
        )
    console.text()
    rows2 = [(name, str(count)) for name, count in sorted(found.schemes.items())]
    console.table(("scheme or type", "tensors"), rows2)
    if found.chat_templates:
        console.text(f"chat templates: {', '.join(found.chat_templates)}")
    for key, value in found.provenance.items():
        if said := _recorded_words(key, value):
            console.text(f"{key.replace('_counts', 's')}: {said}")
    for note in found.notes:
        console.text(f"note: {note}")


def _matching(tensors: Sequence[FileTensorInfo], pattern: str) -> tuple[FileTensorInfo, ...]:
    """Return the tensors whose names match a glob.

    Raises:
        UsageError: there are none; a pattern that matches some, or the nearest name, is told.
    """
    from quantforge.errors import UsageError, nearest

    if pattern == "all":
        pattern = "*"
    chosen = tuple(one for one in tensors if fnmatch.fnmatchcase(one.name, pattern))
    if chosen:
        return chosen
    own = [one for one in tensors if fnmatch.fnmatchcase(one.own, pattern)]
    if own:
        return tuple(replace(one, name=f"{one.own}: {one.name}") for one in own)
    wider = f"*{pattern.strip('*')}*"
    if any(fnmatch.fnmatchcase(one.name, wider) for one in tensors):
        hint = f"--tensors '{wider}'"
    else:
        parts = {part for one in tensors for part in one.name.split(".") if not part.isdecimal()}
        word = (re.findall(r"\w+", pattern) or [pattern])[-1]
        hint = nearest(f"*{word}*", {f"*{part}*" for part in parts})
    raise UsageError(f"--tensors {pattern}: no tensor has such a name", hint)


def _recorded_words(key: str, value: Any) -> str:
    """Return what a manifest says under a key in words; a foreign one may have anything there."""
    if not isinstance(value, dict):
        return "" if value is None else str(value)
    if key == "source":
        return str(value.get("model", ""))
    if key == "calibration":
        sources = value.get("sources")
        text = ", ".join(map(str, sources)) if isinstance(sources, list) else str(sources)
        return f"{text}: {value.get('rows')} rows of {value.get('length')} tokens"
    if key == "event_counts":
        return ", ".join(f"{count} {kind}" for kind, count in value.items())
    return ", ".join(f"{name} {version}" for name, version in value.items())


def _show(console: Console, declared: dict[str, Any]) -> None:
    """Show derived declarations: one table for each kind of layers."""
    if console.as_json:
        console.document(declared)
        return
    console.text(f"{declared['model_type']}  {declared['source']}")
    for kind in declared["kinds"]:
        count = declared["layers"].count(kind["name"])
        console.text()
        console.text(f"{kind['name']}: {count} of {len(declared['layers'])} layers")
        rows = []
        for shared in kind["inputs"]:
            found = shared.get("absorber")
            by = f"{found['kind']} {found['module']}" if found else "-"
            rows.append((", ".join(shared["linears"]), by))
        console.table(("linears that read one activation", "absorbs a scale of it"), rows)
    if declared["unobserved"]:
        console.text()
        console.text(f"never called as linears, and kept: {', '.join(declared['unobserved'])}")
