"""``quantforge inspect``: show the contents of a model, from headers alone."""

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
    inspected = api.inspect(path, offline=offline)
    if tensors is not None:
        inspected = replace(inspected, tensors=_matching_tensors(inspected.tensors, tensors))
    if as_json:
        console.print_document(inspected.document())
        return
    if tensors is not None:
        rows = [
            (tensor.name, tensor.dtype, "x".join(map(str, tensor.shape)), size(tensor.nbytes))
            for tensor in inspected.tensors
        ]
        console.print_table(("tensor", "type", "shape", "bytes"), rows)
        return
    console.print_text(f"{inspected.path}  {inspected.model_type}  {inspected.format}".rstrip())
    totals = (
        f"{inspected.weights:,} weights, {inspected.bits_per_weight:.4f} bits per weight; weights "
    )
    totals = totals if inspected.weights else "values "
    console.print_text(
        f"{totals}{size(inspected.tensor_bytes)}, files {size(inspected.file_bytes)}"
    )
    if inspected.quantized_weights:
        console.print_text(
            f"{inspected.quantized_weights:,} of them quantized,"
            f" {inspected.bits_per_quantized_weight:.4f} bits per quantized weight"
        )
    console.print_text()
    scheme_rows = [(name, str(count)) for name, count in sorted(inspected.schemes.items())]
    console.print_table(("scheme or type", "tensors"), scheme_rows)
    if inspected.chat_templates:
        console.print_text(f"chat templates: {', '.join(inspected.chat_templates)}")
    for key, value in inspected.provenance.items():
        if text := _provenance_text(key, value):
            console.print_text(f"{key.replace('_counts', 's').replace('_', ' ')}: {text}")
    for note in inspected.notes:
        console.print_text(f"note: {note}")


def _matching_tensors(
    tensors: Sequence[FileTensorInfo], pattern: str
) -> tuple[FileTensorInfo, ...]:
    """Return the tensors whose names match a glob.

    Raises:
        UsageError: there are none; the hint is a pattern that matches, or the nearest name.
    """
    from quantforge.errors import UsageError, nearest_hint

    if pattern == "all":
        pattern = "*"
    matching = tuple(tensor for tensor in tensors if fnmatch.fnmatchcase(tensor.name, pattern))
    if matching:
        return matching
    matching_names = [
        tensor for tensor in tensors if fnmatch.fnmatchcase(tensor.file_name, pattern)
    ]
    if matching_names:
        return tuple(
            replace(tensor, name=f"{tensor.file_name}: {tensor.name}") for tensor in matching_names
        )
    wider_pattern = f"*{pattern.strip('*')}*"
    if any(fnmatch.fnmatchcase(tensor.name, wider_pattern) for tensor in tensors):
        hint = f"--tensors '{wider_pattern}'"
    else:
        name_parts = {
            name_part
            for tensor in tensors
            for name_part in tensor.name.split(".")
            if not name_part.isdecimal()
        }
        searched = (re.findall(r"\w+", pattern) or [pattern])[-1]
        hint = nearest_hint(f"*{searched}*", {f"*{name_part}*" for name_part in name_parts})
    raise UsageError(f"--tensors {pattern}: no tensor has such a name", hint)


def _provenance_text(key: str, value: Any) -> str:
    """Return a field of a manifest as text; manifests of other tools may have any value there."""
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
        console.print_document(declared)
        return
    console.print_text(f"{declared['model_type']}  {declared['source']}")
    for kind in declared["kinds"]:
        count = declared["layers"].count(kind["name"])
        console.print_text()
        console.print_text(f"{kind['name']}: {count} of {len(declared['layers'])} layers")
        rows = []
        for shared in kind["inputs"]:
            absorber = shared.get("absorber")
            absorber_text = f"{absorber['kind']} {absorber['module']}" if absorber else "-"
            rows.append((", ".join(shared["linears"]), absorber_text))
        console.print_table(("linears that read one activation", "absorbs a scale of it"), rows)
    if declared["unobserved"]:
        console.print_text()
        console.print_text(
            f"never called as linears, and kept: {', '.join(declared['unobserved'])}"
        )
