"""Coverage of blocks: how much of them a plan quantizes; what stays is named, and where it is much, it is an event.

Counted are the weights of tensors with two dimensions or more inside of the blocks of the decoder. What a person left
alone by a rule is left out of the judgement, and so are the layers of other towers, which are named for themselves;
experts that are stored as one tensor with three dimensions are not, because nobody asked for them to stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quantforge.architectures.match import Role
from quantforge.architectures.routers import experts_of, routers
from quantforge.architectures.towers import BLOCK
from quantforge.events import Event
from quantforge.plans import Action, TensorPlan

LEAST = 0.95  # of the weights inside blocks; below, it is an event
MUCH = 0.05  # of the bytes of a result
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Coverage:
    """Share of the weights inside blocks that is quantized, and the layers that stay.

    Attributes:
        share: of all of them, 1 where there are none.
        kept: layers that stay although no rule says so, blocks joined, with their bytes, the largest first.
        towers: lists of modules that are not the decoder's blocks, with the bytes of what stays in them, and what else
            lies outside of the blocks and takes much of the whole, but for the embedding and the head.
        sparse: share of the weights inside blocks whose tensors get zeros.
    """

    share: float
    kept: Mapping[str, int]
    towers: Mapping[str, int]
    sparse: float = 0.0

    def __str__(self) -> str:
        stays = f"; {_listed(self.kept)} stay as they are" if self.kept else ""
        if self.sparse:
            return f"{self.sparse:.1%} of the weights inside blocks get zeros{stays}"
        towers = f"; of other parts stay {_listed(self.towers)}" if self.towers else ""
        return f"{self.share:.1%} of the weights inside blocks are quantized{stays}{towers}"


def _listed(sizes: Mapping[str, int]) -> str:
    names = [f"{name} ({nbytes:,} bytes)" for name, nbytes in list(sizes.items())[:_SHOWN]]
    more = [f"{len(sizes) - _SHOWN} more"] if len(sizes) > _SHOWN else []
    return ", ".join([*names, *more])


def coverage(tensors: Iterable[TensorPlan]) -> Coverage:
    """Measure the tensors of a plan."""
    tensors = tuple(tensors)
    inside = [tensor for tensor in tensors if _counts(tensor)]
    total = sum(math.prod(tensor.shape) for tensor in inside)
    done = sum(math.prod(t.shape) for t in inside if t.action is Action.QUANTIZE)
    kept: dict[str, int] = {}
    towers: dict[str, int] = {}
    much = MUCH * sum(tensor.output_bytes for tensor in tensors)
    for tensor in tensors:
        block = BLOCK.match(tensor.name) if tensor.block < 0 else None
        if block and tensor.action is Action.KEEP and not block[1].isdecimal():
            towers[block[1]] = towers.get(block[1], 0) + tensor.output_bytes
        elif (
            tensor.block < 0 and tensor.rule == f"{Role.OTHER} kept" and tensor.output_bytes > much
        ):
            towers[tensor.name.removesuffix(".weight")] = tensor.output_bytes
    for tensor in inside:
        if tensor.action is Action.KEEP and not asked(tensor) and not tensor.sparse:
            name = tensor.name.replace(f".{tensor.block}.", ".*.", 1)
            name = re.sub(r"\bexperts\.\d+\.", "experts.*.", name)
            kept[name] = kept.get(name, 0) + tensor.output_bytes
    sparse = sum(math.prod(tensor.shape) for tensor in inside if tensor.sparse)
    share = done / total if total else 1.0
    return Coverage(
        share, _largest_first(kept), _largest_first(towers), sparse / total if total else 0.0
    )


def _largest_first(sizes: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def events(tensors: Iterable[TensorPlan], config: Mapping[str, object]) -> tuple[Event, ...]:
    """Return the events of a plan: too little of the blocks is quantized, or a router is.

    Args:
        tensors: of the plan.
        config: the configuration of the decoder, which says how many experts there are.
    """
    tensors = tuple(tensors)
    rounded = {tensor.name for tensor in tensors if tensor.action is Action.QUANTIZE}
    if not rounded:
        return ()
    found = []
    judged = [tensor for tensor in tensors if not asked(tensor)]
    measured = coverage(judged)
    counts = experts_of(config)
    stacked = [t for t in judged if t.action is Action.KEEP and _counts(t) and _stacked(t, counts)]
    if measured.share < LEAST or stacked:
        found.append(Event("coverage", next(iter(measured.kept), "blocks"), str(measured)))
    shapes = {tensor.name: tensor.shape for tensor in tensors if tensor.block >= 0}
    found += [
        Event("router-rounded", name, "which experts compute is decided by rounded weights")
        for name in sorted(routers(config, shapes) & rounded)
    ]
    return tuple(found)


def _counts(tensor: TensorPlan) -> bool:
    known = tensor.action in {Action.QUANTIZE, Action.KEEP}
    return known and tensor.block >= 0 and len(tensor.shape) > 1


def _stacked(tensor: TensorPlan, counts: frozenset[int]) -> bool:
    return len(tensor.shape) == 3 and tensor.shape[0] in counts


def asked(tensor: TensorPlan) -> bool:
    """Return whether a person keeps a tensor, by a rule."""
    return tensor.action is Action.KEEP and tensor.rule.startswith(("ignore ", "rule "))
