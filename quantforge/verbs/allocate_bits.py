"""Allocate: bits for each group of linears, so that a model of a given size diverges least from its source."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from quantforge.checkpoint.disk import check_new, save
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import UsageError
from quantforge.execution.progress import followed, phase
from quantforge.formats import GGUF, targets
from quantforge.formats.format_choice import settled
from quantforge.formats.opening import as_read, open_model
from quantforge.planning.allocation import Allocated, Allocation
from quantforge.planning.budgets import Option, Point, solved
from quantforge.planning.candidates import check_mixed, plans_of, usual
from quantforge.planning.changed_source import heads_as_asked
from quantforge.planning.cited_files import cited
from quantforge.planning.loader_form import as_loaded
from quantforge.planning.planner import Planned
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.planning.single_experts import single_experts
from quantforge.planning.size_target import SizeTarget, memory_use, parse_target, scale_of
from quantforge.quantizers import ERROR_FEEDBACK
from quantforge.recipe import LayerChoices, Recipe, Rule
from quantforge.settings import Settings, check_device
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.given_options import checks_options, listed
from quantforge.verbs.plan import planned_of

EVERY = "re:.*"  # every linear of blocks: a scheme alone would be a mixture in GGUF


@checks_options(RecipeOptions)
@torch_defaults()
def allocate(
    model: str | Path,
    target: str,
    out: str | Path | None = None,
    recipe: RecipeSource = None,
    settings: Settings | None = None,
    *,
    candidates: str | Sequence[str] = (),
    **options: Unpack[RecipeOptions],
) -> Allocated:
    """Find the scheme of every linear with which a model of a given size diverges least from its source.

    Args:
        model: as of `quantize`.
        target: bits per weight inside of blocks (``3.5bpw``), bytes of all weight files (``18GB``, ``17GiB``), or
            memory of a device that holds the cache of a sequence as well (``24GB@32k``; ``24GB@8x32k`` of eight).
        out: a recipe file to write.
        recipe: what else is wanted; its method is gptq, and it names no width.
        settings: how it runs; ``overwrite`` replaces ``out``; the type of the cache, for a target of memory.
        candidates: schemes to choose from; those that the format holds in usual widths when left out.
        options: choices that override the recipe; an ``engine`` leaves the candidates that it loads mixed.

    Raises:
        UsageError: the target is no size, a method that rounds otherwise, or a width beside the candidates.
        RefusedError: the target is out of reach, the format or the engine takes no mixture, or gradients of the model
            are not computed.
    """
    settings, wanted = settings or Settings(), _wanted(recipe, options)
    asked = parse_target(target, settings.serving.cache, wanted.tensor_parallel)
    if out is not None:
        check_new(Path(out), "--output", overwrite=settings.overwrite)
    check_device(settings.device)
    with followed(settings.progress):
        with phase("planning", 0.02, "headers of the model"):
            read, own = cited(settled(wanted)[0], settings)
            key = read.format
            opened = as_read(open_model(resolve(str(model), settings.offline)), own.adapter)
            source = _as_planned(opened, key, read.engine, read.layers)

            def planned(scheme: str, *rules: Rule) -> Planned:
                wanted = replace(read, scheme=scheme, rules=(*rules, Rule(EVERY, scheme)))
                return planned_of(source, wanted, None, own)

            plans, left_out = plans_of(
                source, planned, _asked(candidates) or usual(key), read.engine,
                given=bool(candidates),
            )  # fmt: skip
            allocation = Allocation(plans, together=key != GGUF)
            room = allocation.room(scale_of(asked, plans[next(iter(plans))]), left_out)
            check_mixed(planned, allocation, [*plans], read.engine)
        choices = allocation.options(_measured(source, [*plans.values()], own))
        point, final = _solved(allocation, choices, room, planned, asked)
        base, rules = allocation.rules_of(point)
    made = replace(wanted, format=key, scheme=base, rules=(*rules, Rule(EVERY, base)))
    if out is not None:
        save(Path(out), made.to_toml().encode(), overwrite=settings.overwrite)
    return Allocated(
        recipe=made, target=target, left_out=left_out, engines=final.plan.engines, memory=memory_use(asked, final),
        nbytes=final.plan.output_bytes, **allocation.outcome(point, choices),
    )  # fmt: skip


def _solved(
    allocation: Allocation, choices: Sequence[Sequence[Option]], room: int, planned: Callable[..., Planned],
    target: SizeTarget,
) -> tuple[Point, Planned]:  # fmt: skip
    """Return the best choice and its plan, whose files, rules in their headers included, are no larger than asked."""
    while True:
        point = solved(choices, room)
        base, rules = allocation.rules_of(point)
        found = planned(base, *rules)
        over = math.ceil(found.plan.output_bytes - target.nbytes) if target.of_files else 0
        if over <= 0:
            return point, found
        room -= over


def _wanted(recipe: RecipeSource, options: RecipeOptions) -> Recipe:
    """Return the recipe without a width: what an engine is fast with in one width is not meant here."""
    engine = options.pop("engine", None)
    devices = None if engine is None else options.pop("tensor_parallel", None)
    wanted = build_recipe(recipe, **options)
    if engine is not None:
        wanted = replace(wanted, engine=engine, tensor_parallel=devices or wanted.tensor_parallel)
        targets.target_of(engine)
    _check(wanted.method, wanted.layers, wanted.guide)
    return replace(wanted, method=ERROR_FEEDBACK)


def _as_planned(
    opened: Checkpoint, key: str, engine: str | None, layers: LayerChoices
) -> Checkpoint:
    """Return the view of a source that `quantize` takes by the same recipe."""
    loaded = as_loaded(opened, key, engine)
    return heads_as_asked(single_experts(loaded, key, layers), layers.mtp)


def _check(method: str, layers: LayerChoices, guide: int) -> None:
    if method not in {"", ERROR_FEEDBACK}:
        raise UsageError(
            f"--method {method}: errors are measured of {ERROR_FEEDBACK} alone",
            "leave --method out",
        )
    if layers.bits or layers.scheme or layers.type or layers.rules:
        raise UsageError(
            "a width, a type or rules are given, and allocate chooses them",
            "name --candidates instead",
        )
    if guide:
        raise UsageError(f"--guide {guide}: errors are measured without it", "leave it out")


def _asked(candidates: str | Sequence[str]) -> list[Sequence[str]]:
    """Return the schemes that are named, each for itself."""
    return [(str(one),) for one in listed(candidates, "candidates", '["int4:g128:sym"]')]


def _measured(
    source: Checkpoint, plans: Sequence[Planned], settings: Settings
) -> dict[str, list[float]]:
    """Draw calibration rows and measure the candidates."""
    import torch

    from quantforge.execution.calibration import calibrated_for
    from quantforge.execution.candidate_errors import candidate_errors
    from quantforge.numerics.team import reproducible

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with reproducible(), tempfile.TemporaryDirectory(prefix="quantforge-allocate-") as scratch:
        with phase("reading", 0.05, "calibration text"):
            calibrated = calibrated_for(source, plans[0], settings)
            assert calibrated is not None
            settings.policy.check(calibrated.events)
            for event in calibrated.events:
                settings.note(f"{event.kind}: {event.detail}")
        with phase("measuring", 0.9):
            return candidate_errors(source, plans, calibrated.sample, settings, Path(scratch))
