"""Coverage: which share of the weights inside the blocks a plan quantizes, and which layers stay unquantized.

Counted are tensors with at least two dimensions inside the decoder's blocks. Tensors that the user keeps by a rule are
not counted against a plan, and neither are layers of other towers, which are listed separately. Experts that are stored
as one tensor with three dimensions are counted, because nobody asked to keep them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quantforge.architectures.match import Role
from quantforge.architectures.routers import expert_counts, find_routers
from quantforge.architectures.towers import NUMBERED_NAME
from quantforge.events import Event
from quantforge.plans import Action, TensorPlan

MIN_SHARE = 0.95  # quantized share of the weights in blocks below which there is an event
LARGE_SHARE = 0.05  # share of the result's bytes above which a tensor outside the blocks is listed
_MAX_NAMES = 4


@dataclass(frozen=True, slots=True)
class Coverage:
    """The share of the weights inside the blocks that is quantized, and the layers that stay unquantized.

    Attributes:
        share: quantized share of these weights; 1 if there are none.
        kept: bytes of layers that stay although no rule keeps them, by name, block indices merged, the largest first.
        outside_blocks: bytes of what stays outside the decoder's blocks: other lists of modules, and large single
            tensors except the embedding and the head.
        sparse: share of the weights inside the blocks whose tensors are made sparse.
    """

    share: float
    kept: Mapping[str, int]
    outside_blocks: Mapping[str, int]
    sparse: float = 0.0

    def __str__(self) -> str:
        stays = f"; {_names_with_sizes(self.kept)} stay as they are" if self.kept else ""
        if self.sparse:
            return f"{self.sparse:.1%} of the weights inside blocks get zeros{stays}"
        towers = (
            f"; of other parts stay {_names_with_sizes(self.outside_blocks)}"
            if self.outside_blocks
            else ""
        )
        return f"{self.share:.1%} of the weights inside blocks are quantized{stays}{towers}"


def _names_with_sizes(sizes: Mapping[str, int]) -> str:
    names = [f"{name} ({nbytes:,} bytes)" for name, nbytes in list(sizes.items())[:_MAX_NAMES]]
    more_text = [f"{len(sizes) - _MAX_NAMES} more"] if len(sizes) > _MAX_NAMES else []
    return ", ".join([*names, *more_text])


def coverage(tensors: Iterable[TensorPlan]) -> Coverage:
    """Return the coverage of some tensor plans."""
    tensors = tuple(tensors)
    counted_tensors = [tensor for tensor in tensors if _is_counted(tensor)]
    total = sum(math.prod(tensor.shape) for tensor in counted_tensors)
    quantized = sum(math.prod(t.shape) for t in counted_tensors if t.action is Action.QUANTIZE)
    kept_bytes: dict[str, int] = {}
    towers: dict[str, int] = {}
    large_bytes = LARGE_SHARE * sum(tensor.output_bytes for tensor in tensors)
    for tensor in tensors:
        block = NUMBERED_NAME.match(tensor.name) if tensor.block < 0 else None
        if block and tensor.action is Action.KEEP and not block[1].isdecimal():
            towers[block[1]] = towers.get(block[1], 0) + tensor.output_bytes
        elif (
            tensor.block < 0
            and tensor.rule == f"{Role.OTHER} kept"
            and tensor.output_bytes > large_bytes
        ):
            towers[tensor.name.removesuffix(".weight")] = tensor.output_bytes
    for tensor in counted_tensors:
        if tensor.action is Action.KEEP and not is_kept_by_user(tensor) and not tensor.sparse:
            name = tensor.name.replace(f".{tensor.block}.", ".*.", 1)
            name = re.sub(r"\bexperts\.\d+\.", "experts.*.", name)
            kept_bytes[name] = kept_bytes.get(name, 0) + tensor.output_bytes
    sparse = sum(math.prod(tensor.shape) for tensor in counted_tensors if tensor.sparse)
    quantized_share = quantized / total if total else 1.0
    return Coverage(
        quantized_share,
        _largest_first(kept_bytes),
        _largest_first(towers),
        sparse / total if total else 0.0,
    )


def _largest_first(sizes: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def events(tensors: Iterable[TensorPlan], config: Mapping[str, object]) -> tuple[Event, ...]:
    """Return events if too little of the blocks is quantized, or if a router is quantized.

    Args:
        tensors: plans of all tensors.
        config: configuration of the decoder, which has the number of experts.
    """
    tensors = tuple(tensors)
    quantized_names = {tensor.name for tensor in tensors if tensor.action is Action.QUANTIZE}
    if not quantized_names:
        return ()
    result = []
    not_kept_by_user = [tensor for tensor in tensors if not is_kept_by_user(tensor)]
    coverage_of_rest = coverage(not_kept_by_user)
    counts = expert_counts(config)
    stacked = [
        t
        for t in not_kept_by_user
        if t.action is Action.KEEP and _is_counted(t) and _is_stacked(t, counts)
    ]
    if coverage_of_rest.share < MIN_SHARE or stacked:
        result.append(
            Event(
                "low-coverage", next(iter(coverage_of_rest.kept), "blocks"), str(coverage_of_rest)
            )
        )
    shapes = {tensor.name: tensor.shape for tensor in tensors if tensor.block >= 0}
    result += [
        Event("router-quantized", name, "which experts compute is decided by rounded weights")
        for name in sorted(find_routers(config, shapes) & quantized_names)
    ]
    return tuple(result)


def _is_counted(tensor: TensorPlan) -> bool:
    is_stored = tensor.action in {Action.QUANTIZE, Action.KEEP}
    return is_stored and tensor.block >= 0 and len(tensor.shape) > 1


def _is_stacked(tensor: TensorPlan, counts: frozenset[int]) -> bool:
    return len(tensor.shape) == 3 and tensor.shape[0] in counts


def is_kept_by_user(tensor: TensorPlan) -> bool:
    """Return whether a rule or an ignore pattern of the user keeps a tensor."""
    return tensor.action is Action.KEEP and tensor.rule.startswith(("ignore ", "rule "))
