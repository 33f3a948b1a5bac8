"""Decisions of plans in words: what is chosen for a user who left it open, and what is substituted.

They are shown before the work begins; of several plans at once, alike ones together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from quantforge.formats.format_choice import CHOSEN
from quantforge.plans import Plan

_NAMED = 3  # plans by name before the others are counted


def decisions(plan: Plan) -> list[str]:
    """Return what a plan chose and what it substitutes."""
    return [*(note for note in plan.notes if note.startswith(CHOSEN)), *substituted(plan)]


def decisions_of(plans: Mapping[str, Plan]) -> list[str]:
    """Return the decisions of several plans, each with the names of its plans before it."""
    owners: dict[str, list[str]] = {}
    for name, plan in plans.items():
        for said in decisions(plan):
            owners.setdefault(said, []).append(name)
    return [f"{_named(names, len(plans))}: {said}" for said, names in owners.items()]


def substituted(plan: Plan) -> list[str]:
    """Return the substitutions of a plan in words, alike ones together: those are of tensors."""
    alike = Counter((event.kind, event.detail) for event in plan.substitutions)
    first = {(event.kind, event.detail): event.where for event in reversed(plan.substitutions)}
    return [
        f"{kind}: {first[kind, detail]}: {detail}"
        if count == 1
        else f"{kind}: {detail}: {count} tensors, the first is {first[kind, detail]}"
        for (kind, detail), count in alike.items()
    ]


def _named(names: list[str], plans: int) -> str:
    if 1 < len(names) == plans:
        return f"all {plans}"
    more = len(names) - _NAMED
    return f"{', '.join(names[:_NAMED])}{f' and {more} more' if more > 0 else ''}"
