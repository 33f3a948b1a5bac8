"""``quantforge demo``: copy out the small model that comes with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantforge.cli import options
from quantforge.cli.console import Console

EXAMPLE = "Example: quantforge demo"


def demo(
    out: Annotated[Path, typer.Argument(help="A new directory.", metavar="[DIR]")] = Path("demo"),
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Copy out a small trained model to try things on: a llama of 4 million weights, 8.4 MB."""
    from quantforge import api

    console = Console(as_json=as_json, quiet=quiet or as_json)
    directory = api.demo(out)
    if as_json:
        console.print_document({"schema": "quantforge.demo/1", "path": str(directory)})
        return
    console.print_text(str(directory))
    console.note(f"next: quantforge plan {directory} --method gptq --bits 4")
