"""Coverage of blocks: how much of them a plan quantizes; what stays is named, and where it is much, it is an event.

Counted are the weights of tensors with two dimensions or more inside of the blocks of the decoder. What a person left
alone by a rule is left out of the judgement, and so are the layers of other towers; experts that are stored as one
tensor with three dimensions are not, because nobody asked for them to stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from quantforge.architectures.generic import TOWERS
from quantforge.architectures.matched import MatchedTensor, Role
from quantforge.architectures.routers import routers
from quantforge.events import Event
from quantforge.planning.rules import matches
from quantforge.plans import Action, StoredTensor, TensorPlan
from quantforge.recipe import LayerChoices

LEAST = 0.95  # of the weights inside blocks; below, it is an event
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Coverage:
    """Share of the weights inside blocks that is quantized, and the layers that stay.

    Attributes:
        share: of all of them, 1 where there are none.
        kept: layers that stay although no rule says so, blocks joined, with their bytes, the largest first.
    """

    share: float
    kept: Mapping[str, int]

    def __str__(self) -> str:
        names = [f"{name} ({nbytes:,} bytes)" for name, nbytes in list(self.kept.items())[:_SHOWN]]
        more = [f"{len(self.kept) - _SHOWN} more"] if len(self.kept) > _SHOWN else []
        stays = f"; {', '.join([*names, *more])} stay as they are" if names else ""
        return f"{self.share:.1%} of the weights inside blocks are quantized{stays}"


def coverage(tensors: Iterable[TensorPlan]) -> Coverage:
    """Measure the tensors of a plan."""
    inside = [tensor for tensor in tensors if _counts(tensor)]
    total = sum(math.prod(tensor.shape) for tensor in inside)
    done = sum(math.prod(t.shape) for t in inside if t.action is Action.QUANTIZE)
    kept: dict[str, int] = {}
    for tensor in inside:
        if tensor.action is Action.KEEP and not _asked(tensor):
            name = tensor.name.replace(f".{tensor.part}.", ".*.", 1)
            name = re.sub(r"\bexperts\.\d+\.", "experts.*.", name)
            kept[name] = kept.get(name, 0) + tensor.stored_bytes
    largest = sorted(kept.items(), key=lambda item: (-item[1], item[0]))
    return Coverage(done / total if total else 1.0, dict(largest))


def events(tensors: Iterable[TensorPlan], config: Mapping[str, object]) -> tuple[Event, ...]:
    """Return what has to be said: too little is quantized, or a router is.

    Args:
        tensors: of the plan.
        config: the configuration of the decoder, which says how many experts there are.
    """
    tensors = tuple(tensors)
    rounded = {tensor.name for tensor in tensors if tensor.action is Action.QUANTIZE}
    if not rounded:
        return ()
    found = []
    judged = [tensor for tensor in tensors if not _asked(tensor)]
    measured = coverage(judged)
    if measured.share < LEAST:
        found.append(Event("coverage", next(iter(measured.kept), "blocks"), str(measured)))
    shapes = {tensor.name: tensor.shape for tensor in tensors if tensor.part >= 0}
    found += [
        Event("router-rounded", name, "which experts compute is decided by rounded weights")
        for name in sorted(routers(config, shapes) & rounded)
    ]
    return tuple(found)


def as_asked(tensors: Iterable[TensorPlan], made: LayerChoices) -> tuple[TensorPlan, ...]:
    """Return tensors of a quantized model, those that stay with the rule by which it was ``made``."""
    wanted = [(pattern, f"ignore {pattern}") for pattern in made.ignore]
    wanted += [(r.match, f"rule {r.match}={r.scheme}") for r in made.rules if r.scheme == "keep"]

    def rule(tensor: TensorPlan) -> str:
        stored = StoredTensor(tensor.name, tensor.dtype, tensor.shape)
        layer = MatchedTensor(tensor.name, stored, Role.LINEAR)
        return next((text for pattern, text in wanted if matches(pattern, layer)), tensor.rule)

    return tuple(replace(t, rule=rule(t)) if t.action is Action.KEEP else t for t in tensors)


def _counts(tensor: TensorPlan) -> bool:
    known = tensor.action in {Action.QUANTIZE, Action.KEEP}
    return known and tensor.part >= 0 and len(tensor.shape) > 1 and not TOWERS.search(tensor.name)


def _asked(tensor: TensorPlan) -> bool:
    return tensor.action is Action.KEEP and tensor.rule.startswith(("ignore ", "rule "))
