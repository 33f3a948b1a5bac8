"""Pairs of a producer and its readers: what every transform that moves factors between them has to see to.

What is stored unquantized takes its factor exactly: a norm's weight is rounded to its stored type first and the factor
becomes the quotient of old and new; where biases or kept matrices take part, factors are powers of two. A pair that
even so could not be stored is left alone, as an event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quantforge.architectures import FoldKind, SharedInput
from quantforge.events import Event
from quantforge.model.block import DecoderBlock
from quantforge.model.scale_folding import expand_heads, fold, representable, shrink_heads
from quantforge.model.statistics import Statistics

LIMIT = 1024.0  # a factor's distance from the mean factor: norms stored in float16 stay in range
TOLERANCE = 2.0**-20  # relative, of a stored value: float32 arithmetic, not a rounded type


def folded(
    part: DecoderBlock, shared: SharedInput, quantized: Collection[str], scale: Tensor
) -> Event | None:
    """Fold factors into a pair; where they could not be stored, change nothing and return the event."""
    if problem := obstacle(part, shared, quantized, scale):
        return Event("pair-skipped", f"{part.name}.{shared.key}", problem)
    fold(part, shared, scale)
    return None


def tied(
    part: DecoderBlock, shared: SharedInput, values: Tensor, join: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return for each column what ``join`` makes of ``values`` ``[in]`` of the columns that share a factor with it.

    ``join`` takes ``[kv_heads, query heads of each, head]`` to ``[kv_heads, head]``.
    """
    if not shared.heads:
        return values
    sizes = part.dimensions
    return expand_heads(sizes, join(values.reshape(sizes.kv_heads, -1, sizes.head)).reshape(-1))


def rescaled(statistics: Statistics, scale: Tensor) -> Statistics:
    """Return the statistics of ``x / scale``, ``scale`` ``[in]``, given those of ``x``; the histogram is dropped."""
    squares, hessian, peaks = statistics.squares, statistics.hessian, statistics.peaks
    return replace(
        statistics,
        squares=None if squares is None else squares / scale.square(),
        hessian=None if hessian is None else hessian / scale[:, None] / scale,
        peaks=None if peaks is None else peaks / scale,
        histogram=None,
    )


def storable(part: DecoderBlock, shared: SharedInput, logs: Tensor, powers: bool) -> Tensor:
    """Return storable factors ``[in]`` near ``2^logs`` over their geometric mean; ``powers``: powers of two."""
    logs = logs - logs.mean()
    scale = torch.exp2(logs.round() if powers else logs).clamp(1 / LIMIT, LIMIT)
    return representable(part, shared, scale)


def obstacle(
    part: DecoderBlock, shared: SharedInput, quantized: Collection[str], scale: Tensor
) -> str:
    """Return which parameter that stays unquantized could not store its value after the fold; "" if there is none."""
    for name, value, offset in _kept(part, shared, quantized, scale):
        difference = (part.as_stored(name, value) - value).abs()
        if not bool((difference <= TOLERANCE * (value.abs() + offset)).all()):
            return f"{name} stays {part.dtype_of(name)} and cannot store the factors"
    return ""


def powers_of_two(part: DecoderBlock, shared: SharedInput, quantized: Collection[str]) -> bool:
    """Return whether anything but a norm's weight has to store its product with the factors."""
    ones = part.weight(shared.key).new_ones(part.weight(shared.key).shape[1])
    kept = sum(1 for _ in _kept(part, shared, quantized, ones))
    return kept > (shared.scale_fold is not None and shared.scale_fold.kind is not FoldKind.ROWS)


def _kept(
    part: DecoderBlock, shared: SharedInput, quantized: Collection[str], scale: Tensor
) -> Iterator[tuple[str, Tensor, float]]:
    """Yield name, new value, and what is added to it in use, of each unquantized parameter that takes a factor."""
    scale_fold = shared.scale_fold
    assert scale_fold is not None
    channels = shrink_heads(part.dimensions, scale) if shared.heads else scale
    weight, bias = f"{scale_fold.module}.weight", f"{scale_fold.module}.bias"
    rows = part.rows(scale_fold.module, scale_fold.rows)
    if scale_fold.kind is not FoldKind.ROWS:
        offset = 1.0 if scale_fold.kind is FoldKind.NORM_PLUS_ONE else 0.0
        yield weight, (part.parameter(weight) + offset) / channels - offset, offset
    elif scale_fold.module not in quantized:
        yield weight, part.weight(scale_fold.module)[rows] / channels[:, None], 0.0
    if part.has(bias):
        yield bias, part.parameter(bias)[rows] / channels, 0.0
    for linear in shared.readers:
        if linear not in quantized:
            yield f"{linear}.weight", part.weight(linear) * scale, 0.0
