"""``quantforge recipes``: list the built-in recipes, or print one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from quantforge.cli import options
from quantforge.cli.console import Console
from quantforge.errors import UsageError, nearest_hint
from quantforge.planning.recipe_options import builtin_recipes


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Print this one.",
            metavar="[NAME]",
            autocompletion=options.complete_from(builtin_recipes()),
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the built-in recipes, or print one to copy from."""
    console = Console(as_json=as_json)
    paths = builtin_recipes()
    if name is not None:
        if name not in paths:
            raise UsageError(f"no recipe '{name}'", nearest_hint(name, paths))
        text = paths[name].read_text(encoding="utf-8").rstrip()
        if as_json:
            console.print_document({"schema": "quantforge.recipe/1", "name": name, "toml": text})
        else:
            console.print_text(text)
        return
    from quantforge.planning.recipe_options import described_recipes

    described = described_recipes()
    if as_json:
        documents = {key: asdict(item) for key, item in described.items()}
        console.print_document({"schema": "quantforge.recipes/2", "recipes": documents})
        return
    rows = [
        (key, item.engine, str(item.bits), item.quality, item.needs)
        for key, item in described.items()
    ]
    console.print_table(("recipe", "engine", "bits", "quality", "needs"), rows)
    console.note(
        "quality: KL divergence from the source in nats per token, of a small model;\n"
        "'weights': without rounded inputs\n"
        "quantforge recipes NAME prints one"
    )
