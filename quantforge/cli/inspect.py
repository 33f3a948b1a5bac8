"""``quantforge inspect``: what is in a model, from headers alone."""

from __future__ import annotations

import fnmatch
from typing import Annotated

import typer

from quantforge.cli import options
from quantforge.cli.console import Console, size

EXAMPLE = "Example: quantforge inspect demo-awq --tensors '*.layers.0.*'"


def inspect(
    path: Annotated[
        str, typer.Argument(help="A model directory, a safetensors file, or org/name.")
    ],
    tensors: Annotated[
        str | None, typer.Option("--tensors", metavar="GLOB", help="List the tensors that match.")
    ] = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
) -> None:
    """Show schemes, bits per weight, sizes and provenance of any safetensors model."""
    from quantforge import verbs

    console = Console(as_json=as_json)
    found = verbs.inspect(path, offline=offline)
    if as_json:
        console.document(found.document())
        return
    if tensors is not None:
        chosen = [t for t in found.tensors if fnmatch.fnmatchcase(t.name, tensors)]
        rows = [(t.name, t.dtype, "x".join(map(str, t.shape)), size(t.nbytes)) for t in chosen]
        console.table(("tensor", "type", "shape", "bytes"), rows)
        return
    console.text(f"{found.path}  {found.model_type}  {found.format}".rstrip())
    console.text(
        f"{found.weights:,} weights, {size(found.tensor_bytes)} of tensors,"
        f" {found.bits_per_weight:.4f} bits per weight"
    )
    if found.quantized_weights:
        console.text(
            f"{found.quantized_weights:,} of them quantized,"
            f" {found.bits_per_quantized_weight:.4f} bits per quantized weight"
        )
    console.text()
    rows2 = [(name, str(count)) for name, count in sorted(found.schemes.items())]
    console.table(("scheme or type", "tensors"), rows2)
    for key, value in found.provenance.items():
        shown = value.get("model", "") if key == "source" else value
        console.text(f"{key}: {shown}")
