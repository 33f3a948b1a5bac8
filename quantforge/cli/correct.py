"""``quantforge correct``: an adapter of low rank that brings a quantized model nearer to its source."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from quantforge.cli import choices, options
from quantforge.cli.completion import models
from quantforge.cli.console import Console
from quantforge.cli.quantize import list_events
from quantforge.cli.request import build_policy, takes_choices
from quantforge.cli.run_log import from_here
from quantforge.results.significant import size

EXAMPLE = "Example: quantforge correct demo demo-gptq-int4 --rank 16"
TEXT = ("calibration", "samples", "length", "seed", "chat_template", "adapter")


@takes_choices(text=TEXT)
def correct(
    model: options.Model,
    quantized: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A quantized form of it.", autocompletion=models),
    ],
    *,
    rank: Annotated[
        int, typer.Option("--rank", metavar="N", min=1, help="Rank of the correction of a linear.")
    ] = 32,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Directory of the adapter (default: PATH-loraN)."),
    ] = None,
    text: choices.Given,
    overwrite: options.Overwrite = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    activations: options.Activations = "memory",
    strict: options.Strict = False,
    allow: options.Allow = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    json_progress: options.JsonProgress = False,
) -> None:  # fmt: skip
    """Write an adapter of PEFT (LoRA) that makes up for a part of what a model lost when it was quantized.

    The model stays as it is. The same command again goes on after any interruption.
    """
    from quantforge.settings import Settings

    console = Console(as_json=as_json, quiet=quiet or as_json, machine=json_progress)
    settings = Settings(
        device=device, threads=threads, activations=activations, offline=offline, overwrite=overwrite,
        policy=build_policy(strict, allow), progress=console.show, note=console.note,
    )  # fmt: skip
    with console.watch():
        from quantforge import verbs

        found = verbs.correct(model, quantized, output, rank=rank, settings=settings, **text)
    if as_json:
        console.document({"schema": "quantforge.correct/1", **found.document()})
        return
    out = from_here(found.out)
    console.text(str(out))
    console.note(f"{found.modules} modules of rank {found.rank}, {size(found.output_bytes)}")
    list_events(console, found.events)
    words = " ".join(shlex.quote(str(one)) for one in (model, quantized))
    console.note(f"next: quantforge eval {words} --correction {shlex.quote(str(out))}")
