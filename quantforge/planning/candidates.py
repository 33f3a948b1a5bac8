"""Candidates of an allocation: schemes that a format holds and an engine loads, each planned for the whole model.

Each is planned alone, which tells sizes and refuses what does not fit; a choice in which they take turns is planned
before anything is measured, because formats and engines may take each of two schemes and no model that has both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import QuantForgeError, RefusedError, UsageError
from quantforge.formats import GGUF, KEEP, format_of
from quantforge.formats.matching import settle_tied
from quantforge.formats.targets import preferred_formats
from quantforge.grids import INTEGER_BITS
from quantforge.notation import ALIASES, parse
from quantforge.planning.allocation import Allocation, others
from quantforge.planning.guidance import guided, refuse_guide
from quantforge.planning.planner import Planned
from quantforge.plans import TensorPlan
from quantforge.quantizers import ERROR_FEEDBACK


def usual(key: str) -> list[Sequence[str]]:
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


def least_bits(
    key: str, plans: Mapping[str, Planned], final: Planned, bits: Mapping[str, float]
) -> dict[str, float]:
    """Return the least bits of a mixture that an engine loads, for engines that do not load the final one.

    Args:
        key: the format.
        plans: of each candidate alone.
        final: the plan of the mixture that was found.
        bits: per weight of each candidate alone.
    """
    known = format_of(key).ABOUT.engines
    found = {}
    for engine in (one.engine for one in final.plan.engines if one.loads is False):
        taken = [
            name
            for name, alone in plans.items()
            if any(one.engine == engine and one.loads is not False for one in alone.plan.engines)
        ]
        if key in preferred_formats(engine) and not known[engine].mixture and len(taken) > 1:
            found[engine] = min(bits[name] for name in taken)
    return found


def plans_of(
    source: Checkpoint,
    planned: Callable[[str], Planned],
    candidates: Sequence[Sequence[str]],
    engine: str | None,
    *,
    given: bool,
    together: bool,
) -> tuple[dict[str, Planned], dict[str, str]]:
    """Return a plan for the first scheme that has one of each candidate, and why others are left out.

    A candidate that is ``given`` has to have one. ``together``: linears of a shared input get one scheme.
    """
    plans: dict[str, Planned] = {}
    left_out: dict[str, str] = {}
    for texts in candidates:
        for text in texts:
            if text == KEEP:
                raise UsageError(
                    f"--candidates {text}: 16 bits are not chosen among",
                    "--ignore PATTERN leaves layers as they are",
                )
            try:
                name = str(parse(text))
                found = planned(name)
            except QuantForgeError as error:
                if given and engine and isinstance(error, RefusedError):
                    hint = f"leave it out; without --candidates those that {engine} loads are taken"
                    raise RefusedError(f"--candidates {text}: {error.message}", hint) from error
                if given:
                    raise
                left_out[text] = error.message
                continue
            _check_apart(name, guided(found.plan.tensors, found.matched), together=together)
            plans[name] = replace(found, matched=settle_tied(found.matched, source))
            left_out = {other: why for other, why in left_out.items() if other not in texts}
            break
    if len(plans) < 2:
        _refuse_few([*plans], left_out, engine)
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


def check_mixed(
    planned: Callable[..., Planned],
    allocation: Allocation,
    names: Sequence[str],
    engine: str | None,
) -> None:
    """Refuse candidates that the format or the engine takes one at a time, but not together."""
    try:
        planned(names[0], *allocation.rules(names[0], allocation.every()))
    except RefusedError as error:
        said = f"no mixture of {', '.join(names)}: {error.message}"
        if engine is None:
            raise RefusedError(said, error.hint) from error
        raise RefusedError(f"--for {engine}: {said}", _one_width(engine)) from error


def _refuse_few(names: Sequence[str], left_out: Mapping[str, str], engine: str | None) -> NoReturn:
    """Refuse candidates among which there is nothing to choose."""
    said = f"fewer than two candidates: {', '.join(names) or 'none'}"
    if engine and left_out:
        raise RefusedError(f"--for {engine}: {said}{others(left_out)}", _one_width(engine))
    more = "name more schemes: --candidates int3:g128:sym,int4:g128:sym"
    raise UsageError(said, next(iter(left_out.values()), more))


def _one_width(engine: str) -> str:
    return f"one width for all: quantforge quantize MODEL --for {engine}"


def _check_apart(name: str, table: Mapping[str, TensorPlan], *, together: bool) -> None:
    """Refuse a scheme under which matrices share parameters that may get others, so that errors would not add up."""
    schemes = {one.scheme.weight for one in table.values() if one.scheme}
    if not together and any(scheme.joint for scheme in schemes):
        raise UsageError(
            f"--candidates {name}: matrices share its parameters", "a scheme by rows or groups"
        )
