"""Allocate: bits for each group of linears, so that a model of a given size diverges least from its source."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from quantforge.checkpoint.disk import check_new, save
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import QuantForgeError, RefusedError, UsageError
from quantforge.execution.progress import followed, phase
from quantforge.formats import GGUF, format_of
from quantforge.formats.format_choice import settled
from quantforge.formats.matching import settle_tied
from quantforge.formats.opening import as_read, open_model
from quantforge.grids import INTEGER_BITS
from quantforge.notation import ALIASES, parse
from quantforge.planning.allocation import Allocated, Allocation
from quantforge.planning.budgets import parse_target, solved
from quantforge.planning.changed_source import heads_as_asked
from quantforge.planning.cited_files import cited
from quantforge.planning.guidance import guided, refuse_guide
from quantforge.planning.planner import Planned
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.planning.single_experts import single_experts
from quantforge.plans import TensorPlan
from quantforge.quantizers import ERROR_FEEDBACK
from quantforge.recipe import LayerChoices, Rule
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
        target: bits per weight inside of blocks (``3.5bpw``), or bytes of all weight files (``18GB``, ``17GiB``).
        out: a recipe file to write.
        recipe: what else is wanted; its method is gptq, and it names no width.
        settings: how it runs; ``overwrite`` replaces ``out``.
        candidates: schemes to choose from; those that the format holds in usual widths when left out.
        options: choices that override the recipe.

    Raises:
        InputError: the target is no size.
        UsageError: a method that rounds otherwise, or a width beside the candidates.
        RefusedError: the target is out of reach, or gradients of the model are not computed.
    """
    settings, wanted = settings or Settings(), build_recipe(recipe, **options)
    asked = parse_target(target)
    _check(wanted.method, wanted.layers, wanted.guide)
    wanted = replace(wanted, method=ERROR_FEEDBACK)
    if out is not None:
        check_new(Path(out), "--output", overwrite=settings.overwrite)
    check_device(settings.device)
    with followed(settings.progress):
        with phase("planning", 0.02, "headers of the model"):
            read, own = cited(wanted, settings)
            key = settled(read)[0].format
            opened = as_read(open_model(resolve(str(model), settings.offline)), own.adapter)
            source = heads_as_asked(single_experts(opened, key, read.layers), read.mtp)

            def planned(scheme: str) -> Planned:
                wanted = replace(read, scheme=scheme, rules=(Rule(EVERY, scheme),))
                return planned_of(source, wanted, None, own)

            plans, left_out = _plans(
                source,
                planned,
                _asked(candidates) or _usual(key),
                given=bool(candidates),
            )
            allocation = Allocation(plans, together=key != GGUF)
            room = allocation.room(asked)
        choices = allocation.options(_measured(source, [*plans.values()], own))
        point = solved(choices, room)
    found = allocation.outcome(point, choices)
    base = max(found["shares"], key=lambda scheme: (found["shares"][scheme], scheme))
    made = replace(wanted, scheme=base, rules=(*allocation.rules(base, point), Rule(EVERY, base)))
    if out is not None:
        save(Path(out), made.to_toml().encode(), overwrite=settings.overwrite)
    return Allocated(recipe=made, target=target, left_out=left_out, **found)


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


def _usual(key: str) -> list[Sequence[str]]:
    """Return the schemes of whole bits: the one with a name of its own, else what ``--bits`` means in a format."""
    found: list[Sequence[str]] = []
    for bits in INTEGER_BITS:
        named = ALIASES.get(f"W{bits}A16") if key != GGUF else None
        try:
            default = format_of(key).default_scheme(bits)
        except QuantForgeError:  # it has no such width
            continue
        found.append((named, default) if named and named != default else (default,))
    return found


def _plans(
    source: Checkpoint,
    planned: Callable[[str], Planned],
    candidates: Sequence[Sequence[str]],
    *,
    given: bool,
) -> tuple[dict[str, Planned], dict[str, str]]:
    """Return a plan for the first scheme that has one of each candidate, and why others are left out.

    A candidate that is ``given`` has to have one.
    """
    plans: dict[str, Planned] = {}
    left_out: dict[str, str] = {}
    for texts in candidates:
        for text in texts:
            try:
                name = str(parse(text))
                found = planned(name)
            except QuantForgeError as error:
                if given:
                    raise
                left_out[text] = error.message
                continue
            _check_apart(name, guided(found.plan.tensors, found.matched))
            plans[name] = replace(found, matched=settle_tied(found.matched, source))
            left_out = {other: why for other, why in left_out.items() if other not in texts}
            break
    if len(plans) < 2:
        raise UsageError(
            f"fewer than two candidates: {', '.join(plans) or 'none'}",
            next(
                iter(left_out.values()),
                "name more schemes: --candidates int3:g128:sym,int4:g128:sym",
            ),
        )
    first = next(iter(plans.values()))
    refuse_guide(
        1, (ERROR_FEEDBACK,), first.plan.tensors, first.matched,
        "allocate", "one width for all: quantforge quantize MODEL --bits 4",
    )  # fmt: skip
    tables = {name: guided(one.plan.tensors, one.matched) for name, one in plans.items()}
    for name, table in tables.items():
        if table.keys() != tables[next(iter(tables))].keys():
            raise RefusedError(
                f"{name}: it rounds other linears than the other candidates", "leave it out"
            )
    return plans, left_out


def _check_apart(name: str, table: Mapping[str, TensorPlan]) -> None:
    """Refuse a scheme under which matrices share parameters, so that errors do not add up."""
    schemes = {one.scheme.weight for one in table.values() if one.scheme}
    if any(scheme.joint or scheme.whole for scheme in schemes):
        raise UsageError(
            f"--candidates {name}: rows share its parameters", "a scheme by rows or groups"
        )


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
        with phase("measuring", 0.9):
            return candidate_errors(source, plans, calibrated.sample, settings, Path(scratch))
