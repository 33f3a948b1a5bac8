"""``quantforge plan``: what would happen, from headers alone."""

from __future__ import annotations

from typing import Annotated

import typer

from quantforge.cli import choices, options, processes
from quantforge.cli.console import Console
from quantforge.files.hub import resolve
from quantforge_files.strict_json import uncollected

EXAMPLE = "Example: quantforge plan demo --method gptq --bits 4"


@options.takes(
    given=choices.recipe_parameters(choices.RECIPE),
    run=options.run_options("threads", "activations", *options.ACCEPTED, "offline"),
    load=options.parameters(options.LOAD),
)
def plan(
    model: options.Model,
    *,
    given: options.Given,
    output: options.Output = None,
    target: options.Target = None,
    like: options.Like = None,
    candidates: options.Candidates = None,
    mmproj: options.Mmproj = False,
    run: options.Given,
    load: options.Given,
    every: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show what `quantize` would do: actions, sizes, memory, substitutions, engines. Writes nothing.

    With --context, --batch, --cache, --memory, --device-name ... also whether the result, or a quantized model as it
    is, fits beside its cache, how fast it can decode at best, and what a million tokens cost.
    """
    from quantforge import api
    from quantforge.cli import plan_summary
    from quantforge.planning import naming

    console = Console(as_json=as_json, quiet=quiet)
    deployment = plan_summary.Deployment(**load)
    serving = options.serving_of(deployment.context, deployment.cache)
    settings = processes.settings_of(run, console, mmproj=mmproj, serving=serving)
    given = {**given, "target": target, "like": like, "candidates": candidates or ()}
    with uncollected():
        if deployment.given:
            used = deployment.load(given.get("tensor_parallel"))
            made, found = api.capacity(model, used, settings=settings, out=output, **given)
        else:
            made, found = api.plan(model, settings=settings, out=output, **given), None
        rows = deployment.rows(found) if found else []
        output = output or naming.default_path(made.name, resolve(model, settings.offline))
        took = plan_summary.forecast(made, output, settings)
        if as_json:
            in_use = {"capacity": plan_summary.capacity_document(found, rows)} if found else {}
            console.document({**plan_summary.plan_document(made, output, took), **in_use})
        else:
            plan_summary.show_plan(console, made, output, took, every=every)
            if found:
                plan_summary.show_capacity(console, found, rows)
    settings.policy.check(made.substitutions)
