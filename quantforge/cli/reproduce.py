"""``quantforge reproduce``: make a result again from its manifest, and compare every file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantforge.cli import choices, options, processes

EXAMPLE = "Example: quantforge reproduce demo-gptq-int4 --source demo"
DIFFERENT_EXIT_CODE = 5


@options.with_option_groups(
    calibration_options=choices.recipe_parameters(("calibration",)),
    run_options=options.run_options(*options.DEVICE_OPTIONS, *options.DISPLAY_OPTIONS),
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
    calibration_options: options.OptionValues,
    imatrix: options.ImatrixFile = None,
    adapter: options.Adapter = None,
    run_options: options.OptionValues,
) -> None:
    """Run the recipe of a result again and compare every file that its manifest lists, but for the card README.md.

    Exit 5 and a list of files if any byte came out otherwise than it is now, edited files included.
    """
    console = processes.console_from_options(run_options)
    settings = processes.settings_from_options(
        run_options,
        console,
        imatrix=imatrix,
        adapter=adapter,
        calibration=calibration_options["calibration"] or "",
        note=lambda _: None,
    )
    with console.progress_meter():
        from quantforge import api

        reproduced = api.reproduce(path, source, settings, output)
    if console.as_json:
        console.print_document(reproduced.document())
    else:
        for name in reproduced.differing:
            edited_text = (
                " (edited or removed since it was made)" if name in reproduced.edited else ""
            )
            console.print_text(f"differs: {name}{edited_text}")
        for name in reproduced.left_out:
            console.note(f"not compared, since it states the name of the result: {name}")
        for name, (recorded, current) in reproduced.versions.items():
            console.note(f"{name} was {recorded or 'absent'} and is {current or 'absent'}")
        num_equal = reproduced.files - len(reproduced.differing)
        console.print_text(f"{num_equal} of {reproduced.files} files came out byte for byte")
    if reproduced.differing:
        raise typer.Exit(DIFFERENT_EXIT_CODE)
