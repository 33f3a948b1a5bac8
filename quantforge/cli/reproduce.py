"""``quantforge reproduce``: make a result again from its manifest, and compare every file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantforge.cli import choices, options, processes

EXAMPLE = "Example: quantforge reproduce demo-gptq-int4 --source demo"
DIFFERENT = 5


@options.takes(
    text=choices.recipe_parameters(("calibration",)),
    run=options.run_options(*options.WHERE, *options.SHOWN),
)
def reproduce(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A result with a manifest."),
    ],
    *,
    source: Annotated[
        str,
        typer.Option("--source", metavar="MODEL", help="What it was made from."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH",
            help="Keep the second result here (what states another name is not compared).",
        ),
    ] = None,
    text: options.Given,
    imatrix: options.ImatrixFile = None,
    adapter: options.Adapter = None,
    run: options.Given,
) -> None:
    """Run the recipe of a result again and compare every file that its manifest lists, but for the card README.md.

    Exit 5 and a list of files if any byte came out otherwise than it is now, edited files included.
    """
    console = processes.console_of(run)
    settings = processes.settings_of(
        run,
        console,
        imatrix=imatrix,
        adapter=adapter,
        calibration=text["calibration"] or "",
        note=lambda _: None,
    )
    with console.watch():
        from quantforge import api

        made = api.reproduce(path, source, settings, output)
    if console.as_json:
        console.document(made.document())
    else:
        for name in made.differing:
            since = " (edited or removed since it was made)" if name in made.edited else ""
            console.text(f"differs: {name}{since}")
        for name in made.left_out:
            console.note(f"not compared, since it states the name of the result: {name}")
        for name, (then, now) in made.versions.items():
            console.note(f"{name} was {then or 'absent'} and is {now or 'absent'}")
        same = made.files - len(made.differing)
        console.text(f"{same} of {made.files} files came out byte for byte")
    if made.differing:
        raise typer.Exit(DIFFERENT)
