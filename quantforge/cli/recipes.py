"""``quantforge recipes``: list the built-in recipes, or print one."""

from __future__ import annotations

from typing import Annotated

import typer

from quantforge.cli import options
from quantforge.cli.console import Console
from quantforge.errors import InputError, nearest
from quantforge.planning.recipe_options import builtin_recipes


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one.", metavar="[NAME]")] = None,
    as_json: options.Json = False,
) -> None:
    """List the built-in recipes, or print one to copy from."""
    console = Console(as_json=as_json)
    known = builtin_recipes()
    if name is not None:
        if name not in known:
            raise InputError(f"no recipe '{name}'", nearest(name, known))
        text = known[name].read_text(encoding="utf-8").rstrip()
        if as_json:
            console.document({"schema": "quantforge.recipe/1", "name": name, "toml": text})
        else:
            console.text(text)
        return
    about = {
        key: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for key, path in known.items()
    }
    if as_json:
        console.document({"schema": "quantforge.recipes/1", "recipes": about})
        return
    console.table(("recipe", "what it is"), list(about.items()))
