"""``quantforge plan``: show what `quantize` would do, from headers alone."""

from __future__ import annotations

from typing import Annotated

import typer

from quantforge.cli import choices, options, processes
from quantforge.cli.console import Console
from quantforge.files.hub import resolve_model
from quantforge_files.strict_json import gc_paused

EXAMPLE = "Example: quantforge plan demo --method gptq --bits 4"


@options.with_option_groups(
    recipe_options=choices.recipe_parameters(choices.RECIPE_OPTIONS),
    run_options=options.run_options("threads", "activations", *options.POLICY_OPTIONS, "offline"),
    load_options=options.parameters(options.LOAD_OPTIONS),
)
def plan(
    model: options.Model,
    *,
    recipe_options: options.OptionValues,
    output: options.Output = None,
    target: options.Target = None,
    like: options.Like = None,
    candidates: options.Candidates = None,
    mmproj: options.Mmproj = False,
    run_options: options.OptionValues,
    load_options: options.OptionValues,
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
    deployment = plan_summary.Deployment(**load_options)
    serving = options.build_serving(deployment.context, deployment.cache)
    settings = processes.settings_from_options(run_options, console, mmproj=mmproj, serving=serving)
    plan_options = {
        **recipe_options,
        "target": target,
        "like": like,
        "candidates": candidates or (),
    }
    with gc_paused():
        if deployment.is_given:
            load = deployment.load(plan_options.get("tensor_parallel"))
            plan_result, capacity = api.capacity(
                model, load, settings=settings, out=output, **plan_options
            )
        else:
            plan_result, capacity = (
                api.plan(model, settings=settings, out=output, **plan_options),
                None,
            )
        rows = deployment.rows(capacity) if capacity else []
        output = output or naming.default_path(
            plan_result.name, resolve_model(model, settings.offline)
        )
        forecast = plan_summary.forecast(plan_result, output, settings)
        if as_json:
            capacity_fields = (
                {"capacity": plan_summary.capacity_document(capacity, rows)} if capacity else {}
            )
            console.print_document(
                {**plan_summary.plan_document(plan_result, output, forecast), **capacity_fields}
            )
        else:
            plan_summary.show_plan(console, plan_result, output, forecast, all_tensors=every)
            if capacity:
                plan_summary.show_capacity(console, capacity, rows)
    settings.policy.check(plan_result.substitutions)
