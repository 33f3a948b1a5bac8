"""``quantforge allocate``: bits for each layer, within a size."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantforge.artifacts.number_text import significant, size
from quantforge.cli import choices, options, processes
from quantforge.cli.console import Console
from quantforge.cli.path_arguments import typed_adapter

if TYPE_CHECKING:
    from quantforge.api import Allocated

EXAMPLE = "Example: quantforge allocate demo --target 3.5bpw -o mixed.toml"
_CHOSEN_HERE = {
    "method",
    "effort",
    "bits",
    "scheme",
    "type",
    "rules",
    "guided_hessians",
    "tune",
    "prune_experts",
    "sparsity",
}


@options.takes(
    given=choices.recipe_parameters(name for name in choices.RECIPE if name not in _CHOSEN_HERE),
    run=options.run_options(
        *options.WHERE, "activations", *options.ACCEPTED, *options.SHOWN, "reasons"
    ),
)
def allocate(
    model: options.Model,
    *,
    target: options.Target = None,
    like: options.Like = None,
    candidates: options.Candidates = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The recipe to write.")
    ],
    given: options.Given,
    cache: options.Cache = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the recipe.")] = False,
    run: options.Given,
) -> None:
    """Choose a scheme for every layer, so that a model of a given size diverges least; write it as a recipe for gptq.

    The errors of all candidates are measured with the solver that will round them.
    """
    console = processes.console_of(run)
    settings = processes.settings_of(
        run, console, overwrite=overwrite, serving=options.serving_of(None, cache)
    )
    with console.watch():
        from quantforge import api

        found = api.allocate(
            model,
            target,
            output,
            settings=settings,
            like=like,
            candidates=candidates or (),
            **given,
        )
    if console.as_json:
        console.document(
            {"schema": "quantforge.allocate/1", "path": str(output), **found.document()}
        )
        return
    _show(console, found)
    words = f"quantize {shlex.quote(model)} --recipe {shlex.quote(str(output))}"
    console.note(f"next: quantforge {words}{typed_adapter(given['adapter'])}")


def _left_out(found: Allocated) -> str:
    """Return a line on the usual schemes that are no candidates."""
    count, takes = len(found.left_out), found.recipe.engine or found.recipe.format
    said = "scheme is no candidate" if count == 1 else "schemes are no candidates"
    return f"{count} usual {said}: {takes} does not take them for this model (-v says why of each)"


def _show(console: Console, found: Allocated) -> None:
    rows = [
        (name, f"{bits:.3f}", size(nbytes), significant(nats))
        for name, (nbytes, bits, nats) in found.uniform.items()
    ]
    made = ("the recipe", f"{found.bits:.3f}", size(found.nbytes), significant(found.nats))
    rows.append(made)
    console.table(("scheme", "bits in blocks", "files", "expected KL"), rows)
    console.text()
    weights = sum(found.shares.values())
    for scheme, count in sorted(found.shares.items()):
        console.entry(scheme, f"{100 * count / weights:.0f} % of the weights inside of blocks")
    if found.left_out:
        console.footer(_left_out(found))
    for scheme, why in found.left_out.items():
        console.detail(f"{scheme} is no candidate: {why}")
    console.text(
        "bits in blocks: of a weight there, as planned; `quantize` says what it stores, head and embedding apart"
    )
    console.text("expected KL: nats per token that errors inside of blocks cause, to second order")
    console.text()
    console.table(
        ("engine", "loads", "why"),
        [(v.engine, v.word, v.reason) for v in found.engines],
    )
    console.text()
    loading = [one.engine for one in found.engines if one.loads]
    console.wrapped(f"loaded by {', '.join(loading) or 'none of these'}")
