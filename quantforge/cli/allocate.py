"""``quantforge allocate``: bits for each layer, within a size."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantforge.artifacts.number_text import significant, size
from quantforge.cli import choices, options, processes
from quantforge.cli.console import Console
from quantforge.cli.path_arguments import adapter_arguments

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


@options.with_option_groups(
    recipe_options=choices.recipe_parameters(
        name for name in choices.RECIPE_OPTIONS if name not in _CHOSEN_HERE
    ),
    run_options=options.run_options(
        *options.DEVICE_OPTIONS,
        "activations",
        *options.POLICY_OPTIONS,
        *options.DISPLAY_OPTIONS,
        "reasons",
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
    recipe_options: options.OptionValues,
    cache: options.Cache = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the recipe.")] = False,
    run_options: options.OptionValues,
) -> None:
    """Choose a scheme for every layer, so that a model of a given size diverges least; write it as a recipe for gptq.

    The errors of all candidates are measured with the solver that will round them.
    """
    console = processes.console_from_options(run_options)
    settings = processes.settings_from_options(
        run_options, console, overwrite=overwrite, serving=options.build_serving(None, cache)
    )
    with console.progress_meter():
        from quantforge import api

        allocated = api.allocate(
            model,
            target,
            output,
            settings=settings,
            like=like,
            candidates=candidates or (),
            **recipe_options,
        )
    if console.as_json:
        console.print_document(
            {"schema": "quantforge.allocate/2", "path": str(output), **allocated.document()}
        )
        return
    _show(console, allocated)
    command = f"quantize {shlex.quote(model)} --recipe {shlex.quote(str(output))}"
    console.note(f"next: quantforge {command}{adapter_arguments(recipe_options['adapter'])}")


def _left_out(allocated: Allocated) -> str:
    """Return a line about the usual schemes that are not candidates."""
    count, target = len(allocated.left_out), allocated.recipe.engine or allocated.recipe.format
    verb_text = "scheme is no candidate" if count == 1 else "schemes are no candidates"
    return f"{count} usual {verb_text}: {target} does not take them for this model (-v says why of each)"


def _show(console: Console, allocated: Allocated) -> None:
    rows = [
        (name, f"{bits:.3f}", size(nbytes), significant(nats))
        for name, (nbytes, bits, nats) in allocated.uniform.items()
    ]
    recipe_row = (
        "the recipe",
        f"{allocated.bits:.3f}",
        size(allocated.nbytes),
        significant(allocated.nats),
    )
    rows.append(recipe_row)
    console.print_table(("scheme", "bits in blocks", "files", "expected KL"), rows)
    console.print_text()
    weights = sum(allocated.shares.values())
    for scheme, count in sorted(allocated.shares.items()):
        console.print_entry(
            scheme, f"{100 * count / weights:.0f} % of the weights inside of blocks"
        )
    if allocated.left_out:
        console.print_footer(_left_out(allocated))
    for scheme, reason in allocated.left_out.items():
        console.print_detail(f"{scheme} is no candidate: {reason}")
    console.print_text(
        "bits in blocks: of a weight there, as planned; `quantize` says what it stores, head and embedding apart"
    )
    console.print_text(
        "expected KL: nats per token that errors inside of blocks cause, to second order"
    )
    console.print_text()
    console.print_table(
        ("engine", "loads", "why"),
        [(verdict.engine, verdict.word, verdict.reason) for verdict in allocated.engines],
    )
    console.print_text()
    loading = [verdict.engine for verdict in allocated.engines if verdict.loads]
    console.print_wrapped(f"loaded by {', '.join(loading) or 'none of these'}")
