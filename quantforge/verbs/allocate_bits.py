"""Allocate: bits for each group of linears, so that a model of a given size diverges least from its source."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from quantforge.checkpoint.disk import check_new, save
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import InputError, QuantForgeError, RefusedError, UsageError
from quantforge.execution.progress import followed, phase
from quantforge.formats.format_choice import settled
from quantforge.formats.matching import settle_tied
from quantforge.formats.opening import as_read, open_model
from quantforge.notation import parse
from quantforge.planning.budgets import (
    Option,
    Point,
    Target,
    curve,
    parse_target,
    patterns_of,
    point_of,
    solved,
)
from quantforge.planning.changed_source import heads_as_asked
from quantforge.planning.cited_files import cited
from quantforge.planning.guidance import guided, refuse_guide
from quantforge.planning.planner import Planned
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.planning.single_experts import single_experts
from quantforge.plans import TensorPlan
from quantforge.quantizers import ERROR_FEEDBACK
from quantforge.recipe import LayerChoices, Recipe, Rule
from quantforge.settings import Settings, check_device
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.plan import planned_of

FILE_TYPES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")  # of GGUF
INTEGERS = (
    "int2:g64:asym",
    "int3:g128:sym",
    "int4:g128:sym",
    "int5:g128:sym",
    "int6:g128:sym",
    "int8:g128:sym",
)
GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class Allocated:
    """Outcome of an allocation.

    Attributes:
        recipe: gives every linear its scheme.
        target: as it was asked for.
        nbytes: of all weight files of the result, as planned.
        bits: bits per weight inside of the blocks.
        nats: of divergence per token that the errors inside of blocks are expected to cause.
        groups: the linears of each group.
        chosen: of each group, its scheme.
        uniform: bytes, bits and nats of each candidate alone, by its scheme.
        front: bytes and nats of the best choices from the least size to the most.
        left_out: candidates that the format does not hold, and why.
    """

    recipe: Recipe
    target: str
    nbytes: int
    bits: float
    nats: float
    groups: tuple[tuple[str, ...], ...]
    chosen: tuple[str, ...]
    uniform: Mapping[str, tuple[int, float, float]]
    front: tuple[tuple[int, float], ...]
    left_out: Mapping[str, str]

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "target": self.target,
            "bytes": self.nbytes,
            "bits_per_weight": self.bits,
            "nats": self.nats,
            "groups": [
                {"linears": linears, "scheme": scheme}
                for linears, scheme in zip(self.groups, self.chosen, strict=True)
            ],
            "uniform": [
                {"scheme": name, "bytes": size, "bits_per_weight": bits, "nats": nats}
                for name, (size, bits, nats) in self.uniform.items()
            ],
            "front": [{"bytes": size, "nats": nats} for size, nats in self.front],
            "left_out": dict(self.left_out),
        }


@torch_defaults()
def allocate(
    model: str | Path,
    target: str,
    out: str | Path | None = None,
    recipe: RecipeSource = None,
    settings: Settings | None = None,
    *,
    candidates: Sequence[str] = (),
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
                return planned_of(source, replace(read, scheme=scheme), None, own)

            plans, left_out = _plans(
                source, planned, candidates or _usual(key), given=bool(candidates)
            )
            tables = [guided(one.plan.tensors, one.matched) for one in plans.values()]
            groups = _groups(tables[0], together=key != GGUF)
            room = _room(asked, [*plans.values()], tables, groups)
        nats = _measured(source, [*plans.values()], own)
        names = [*plans]
        choices = [
            [
                Option(
                    name,
                    sum(table[linear].stored_bytes for linear in linears),
                    math.fsum(nats[linear][place] for linear in linears),
                )
                for place, (name, table) in enumerate(zip(names, tables, strict=True))
            ]
            for linears in groups
        ]
        point = solved(choices, room)
    first = next(iter(plans.values()))
    fixed = first.plan.output_bytes - sum(one.stored_bytes for one in tables[0].values())
    weights = sum(math.prod(one.shape) for one in tables[0].values())
    uniform = {
        name: _figures(point_of([options[place] for options in choices]), fixed, weights)
        for place, name in enumerate(names)
    }
    size, bits, loss = _figures(point, fixed, weights)
    made = replace(wanted, **_as_rules(point, groups, first))
    if out is not None:
        save(Path(out), made.to_toml().encode(), overwrite=settings.overwrite)
    return Allocated(
        made, target, size, bits, loss, groups, tuple(one.scheme for one in point.chosen), uniform,
        tuple((fixed + one.nbytes, one.nats) for one in curve(choices)), left_out,
    )  # fmt: skip


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


def _usual(key: str) -> tuple[str, ...]:
    return FILE_TYPES if key == GGUF else INTEGERS


def _plans(
    source: Checkpoint, planned: Callable[[str], Planned], candidates: Sequence[str], *, given: bool
) -> tuple[dict[str, Planned], dict[str, str]]:
    """Return a plan for each candidate, and why others are left out, which is an error where they were given."""
    plans: dict[str, Planned] = {}
    left_out: dict[str, str] = {}
    for text in candidates:
        name = str(parse(text))
        try:
            found = planned(name)
        except QuantForgeError as error:
            if given:
                raise
            left_out[name] = error.message
            continue
        table = guided(found.plan.tensors, found.matched)
        if any(
            one.scheme and (one.scheme.weight.joint or one.scheme.weight.whole)
            for one in table.values()
        ):
            raise UsageError(
                f"--candidates {text}: matrices share its parameters", "a scheme by rows or groups"
            )
        plans[name] = replace(found, matched=settle_tied(found.matched, source))
    if len(plans) < 2:
        raise UsageError(
            "fewer than two candidates", "; ".join(left_out.values()) or "name more schemes"
        )
    first = next(iter(plans.values()))
    refuse_guide(1, (ERROR_FEEDBACK,), first.plan.tensors, first.matched)
    tables = {name: guided(one.plan.tensors, one.matched) for name, one in plans.items()}
    for name, table in tables.items():
        if table.keys() != tables[next(iter(tables))].keys():
            raise RefusedError(
                f"{name}: it rounds other linears than the other candidates", "leave it out"
            )
    return plans, left_out


def _groups(table: Mapping[str, TensorPlan], *, together: bool) -> tuple[tuple[str, ...], ...]:
    """Return the linears that get one scheme: those of a shared input, which engines join, or each alone."""
    groups: dict[object, list[str]] = {}
    for name, tensor in table.items():
        key = (tensor.part, tensor.shared) if together and tensor.shared else name
        groups.setdefault(key, []).append(name)
    return tuple(tuple(names) for names in groups.values())


def _room(
    target: Target,
    plans: Sequence[Planned],
    tables: Sequence[Mapping[str, TensorPlan]],
    groups: Sequence[Sequence[str]],
) -> int:
    """Return the bytes that linears of blocks may take.

    Raises:
        RefusedError: the target is below the smallest choice or above the largest.
    """
    sizes = [
        [sum(table[one].stored_bytes for one in group) for table in tables] for group in groups
    ]
    least, most = sum(map(min, sizes)), sum(map(max, sizes))
    fixed = plans[0].plan.output_bytes - sum(one.stored_bytes for one in tables[0].values())
    weights = sum(math.prod(one.shape) for one in tables[0].values())
    if target.bits is not None:
        room, shown = (
            int(target.bits * weights / 8),
            [f"{8 * size / weights:.4g}bpw" for size in (least, most)],
        )
    else:
        assert target.nbytes is not None
        room, shown = target.nbytes - fixed, [f"{fixed + size:,} bytes" for size in (least, most)]
    if room < least or room > most + weights // 8:
        side = "below the smallest" if room < least else "above the largest"
        raise RefusedError(
            f"--target {target.text}: it is {side} of the candidates",
            f"from {shown[0]} to {shown[1]}",
        )
    return room


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


def _figures(point: Point, fixed: int, weights: int) -> tuple[int, float, float]:
    return fixed + point.nbytes, 8 * point.nbytes / weights, point.nats


def _as_rules(point: Point, groups: Sequence[Sequence[str]], planned: Planned) -> dict[str, Any]:
    """Return the fields of a recipe: the scheme that most weights get, and rules for all others."""
    schemes = {
        name: one.scheme for one, group in zip(point.chosen, groups, strict=True) for name in group
    }
    sizes = {tensor.name.removesuffix(".weight"): tensor for tensor in planned.matched.tensors}
    totals: dict[str, int] = {}
    for name, scheme in schemes.items():
        totals[scheme] = totals.get(scheme, 0) + math.prod(sizes[name].stored.shape)
    base = max(totals, key=lambda scheme: (totals[scheme], scheme))
    places = {}
    for name in schemes:
        block = planned.matched.block_name(sizes[name].block)
        number = block.rpartition(".")[2]
        if not number.isdecimal():
            raise InputError(
                f"{block}: blocks are not numbered at the end of their name", "leave it out"
            )
        before = block.removesuffix(number)
        places[name] = (before, name.removeprefix(block))
    rules = patterns_of({name: one for name, one in schemes.items() if one != base}, places)
    return {"scheme": base, "rules": tuple(Rule(*rule) for rule in rules)}
