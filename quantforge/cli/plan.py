"""``quantforge plan``: what would happen, from headers alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from quantforge.cli import choices, options, plan_capacity, plan_forecast
from quantforge.cli.console import Console
from quantforge.cli.plan_forecast import Forecast
from quantforge.cli.request import build_policy, serving_of, takes_choices
from quantforge.cli.run_log import shown
from quantforge.formats.targets import with_output_path
from quantforge.plans import Action, Plan, TensorPlan, substituted
from quantforge.results.significant import size, sized
from quantforge_files.strict_json import uncollected

EXAMPLE = "Example: quantforge plan demo --method gptq --bits 4"

_NUMBER = re.compile(r"\.\d+(?=\.)")


@takes_choices(given=tuple(choices.RECIPE))
def plan(
    model: options.Model,
    *,
    given: choices.Given,
    output: options.Output = None,
    target: options.Target = None,
    like: options.Like = None,
    candidates: options.Candidates = None,
    mmproj: options.Mmproj = False,
    threads: options.Threads = None,
    activations: options.Activations = "memory",
    strict: options.Strict = False,
    allow: options.Allow = None,
    offline: options.Offline = False,
    context: options.Context = None,
    batch: options.Batch = None,
    cache: options.Cache = None,
    memory: options.Memory = None,
    bandwidth: options.Bandwidth = None,
    compute: options.Compute = None,
    device_name: options.DeviceName = None,
    price: options.Price = None,
    every: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show what `quantize` would do: actions, sizes, memory, substitutions, engines. Writes nothing.

    With --context, --batch, --cache, --memory, --device-name ... also whether the result, or a quantized model as it
    is, fits beside its cache, how fast it can decode at best, and what a million tokens cost.
    """
    from quantforge import verbs
    from quantforge.checkpoint.hub import resolve
    from quantforge.planning import naming
    from quantforge.settings import Settings

    console = Console(as_json=as_json, quiet=quiet)
    deployment = plan_capacity.Deployment(
        context, batch, cache, memory, bandwidth, compute, device_name, price
    )
    settings = Settings(threads=threads, activations=activations, offline=offline, mmproj=mmproj,
                        serving=serving_of(context, cache))  # fmt: skip
    given = {**given, "target": target, "like": like, "candidates": candidates or ()}
    with uncollected():
        if deployment.given:
            load = deployment.load(given.get("tensor_parallel"))
            made, found = verbs.capacity(model, load, settings=settings, out=output, **given)
        else:
            made, found = verbs.plan(model, settings=settings, out=output, **given), None
        rows = deployment.rows(found) if found else []
        output = output or naming.place(made.name, resolve(model, offline))
        took = plan_forecast.forecast(made, output, settings)
        if as_json:
            in_use = {"capacity": plan_capacity.document(found, rows)} if found else {}
            console.document({**document(made, output, took), **in_use})
        else:
            show(console, made, output, took, every=every)
            if found:
                plan_capacity.show(console, found, rows)
    build_policy(strict, allow).check(made.substitutions)


def show(console: Console, plan: Plan, output: Path, took: Forecast | None, *, every: bool) -> None:
    """Print a plan: totals, what its run takes, what happens to which layers, engines, substitutions."""
    from quantforge.planning.coverage import coverage

    if every:
        rows = [
            (
                tensor.name,
                "x".join(map(str, tensor.shape)),
                tensor.dtype,
                becomes(tensor),
                size(tensor.stored_bytes),
                tensor.rule,
            )
            for tensor in plan.tensors
        ]
        console.table(("tensor", "shape", "type", "becomes", "bytes", "rule"), rows)
    else:
        console.table(("layers", "tensors", "becomes", "bytes", "rule"), summary(plan))
    console.text()
    for name, said in (
        ("method", f"{plan.method}  ->  {plan.format}"),
        ("density", plan.density),
        ("output", shown(output)),
        ("files", f"{sized(plan.output_bytes)} in {len(plan.shards)}"),
        ("coverage", str(coverage(plan.tensors))),
        ("peak memory", f"{size(plan.peak_memory_bytes)} above the imports"),
    ):
        if (
            plan.peak_memory_bytes or name != "peak memory"
        ):  # which is not forecast of a mere conversion
            console.entry(name, said)
    if took is not None:
        plan_forecast.show(console, took, shown(output))
    for name, said in (
        *(
            ("note", with_output_path(note, shown(output)))
            for note in (*plan.notes, *plan.left_behind)
        ),
    ):
        console.entry(name, said)
    for text in substituted(plan):
        console.text(text)
    console.text()
    console.table(
        ("engine", "loads", "why"),
        [(v.engine, v.word, v.reason) for v in plan.engines],
    )


def summary(plan: Plan) -> list[tuple[str, ...]]:
    """Return rows that join the layers of all blocks that share name, action, scheme and rule."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for tensor in plan.tensors:
        key = (_generic(tensor), becomes(tensor), tensor.rule)
        groups.setdefault(key, []).append(tensor.stored_bytes)
    return [
        (name, str(len(stored)), made, size(sum(stored)), rule)
        for (name, made, rule), stored in groups.items()
    ]


def becomes(tensor: TensorPlan) -> str:
    """Return the scheme that a tensor gets, or what else is done with it."""
    return str(tensor.scheme or tensor.action.value)


def _generic(tensor: TensorPlan) -> str:
    """Return the name of a layer, that of all blocks and of all experts together: ``layers.*.mlp.up_proj``.

    Outside of the blocks, as in towers, layers of all numbers are one.
    """
    name = tensor.name.removesuffix(".weight")
    if tensor.part < 0:
        return _NUMBER.sub(".*", name)
    blocks, found, layer = f".{name}".partition(f".{tensor.part}.")
    if not found:
        return name
    if tensor.expert >= 0:
        layer = ".*.".join(layer.rsplit(f".{tensor.expert}.", 1))
    return f"{blocks.rpartition('.')[2]}.*.{layer}".lstrip(".")


def document(plan: Plan, output: Path, took: Forecast | None) -> dict[str, object]:
    """Return the plan as plain data (``quantforge.plan/1``)."""
    from quantforge.planning.coverage import coverage

    return {
        "schema": "quantforge.plan/1",
        "model": plan.model,
        "output": str(output),
        "model_type": plan.model_type,
        "method": plan.method,
        "format": plan.format,
        "bits_per_weight": plan.bits_per_weight,
        "bits_per_weight_in_blocks": plan.bits_per_weight_in_blocks,
        "bits_per_weight_total": plan.bits_per_weight_total,
        "block_share_quantized": coverage(plan.tensors).share,
        "kept_in_blocks": dict(coverage(plan.tensors).kept),
        "output_bytes": plan.output_bytes,
        "files": len(plan.shards),
        "peak_memory_bytes": plan.peak_memory_bytes,
        "forecast": plan_forecast.document(took) if took else None,
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "action": tensor.action.value,
                "scheme": str(tensor.scheme) if tensor.scheme else None,
                "rule": tensor.rule,
                "bytes": tensor.stored_bytes if tensor.action is not Action.DROP else 0,
            }
            for tensor in plan.tensors
        ],
        "engines": [
            {"engine": v.engine, "loads": v.loads, "reason": v.reason} for v in plan.engines
        ],
        "substitutions": [event.to_json() for event in plan.substitutions],
        "notes": [with_output_path(note, output) for note in plan.notes],
        "left_behind": plan.left_behind,
    }
