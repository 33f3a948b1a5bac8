"""Strips of rows of matrices that are rounded under a Hessian of their own, and how they go together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers import Rounded

if TYPE_CHECKING:
    from quantforge.model.block import BlockPart


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows that are rounded under one Hessian.

    Attributes:
        key: of the shared input.
        linears: names inside of the block; several only where their rows share parameters.
        index: which of ``count`` strips of the rows.
        count: 1 for all rows.
    """

    key: str
    linears: tuple[str, ...]
    index: int = 0
    count: int = 1


class RoundedStrip(NamedTuple):
    """Rows of matrices that were rounded, with what their errors are relative to."""

    rounded: dict[str, Rounded]
    sizes: dict[str, float]


def passes_of(part: BlockPart, strips: Sequence[Strip]) -> Iterator[list[Strip]]:
    """Yield strips together whose Hessians take no more than those of the shared inputs; one at least."""
    widths = {shared.key: part.weight(shared.linears[0]).shape[1] for shared in part.inputs}
    limit = sum(widths[key] ** 2 for key in {strip.key for strip in strips})
    together: list[Strip] = []
    for strip in strips:
        if together and sum(widths[one.key] ** 2 for one in [*together, strip]) > limit:
            yield together
            together = []
        together.append(strip)
    if together:
        yield together


def joined(strips: Sequence[RoundedStrip]) -> dict[str, Rounded]:
    """Return matrices whose strips were rounded one by one; their errors count by what they are relative to."""
    if len(strips) == 1:
        return strips[0].rounded
    joined = {}
    for name, first in strips[0].rounded.items():
        parts = [strip.rounded[name] for strip in strips]
        tensors = [part.tensor for part in parts]
        parameters = {
            key: torch.cat([tensor.parameters[key] for tensor in tensors])
            for key in first.tensor.parameters
        }
        codes = torch.cat([tensor.codes for tensor in tensors])
        events = dict.fromkeys(event for part in parts for event in part.events)
        figures = dict.fromkeys((key for part in parts for key in part.figures), 0.0)
        whole = sum(strip.sizes[name] for strip in strips) or 1.0
        for part, strip in zip(parts, strips, strict=True):
            for key, value in part.figures.items():
                figures[key] += value * strip.sizes[name] / whole if key == "error" else value
        tensor = QuantizedTensor(codes, parameters, first.tensor.scheme)
        joined[name] = Rounded(tensor, tuple(events), figures)
    return joined
