"""Fold factors between a producer and its readers, shared by all transforms that move scales between them.

Unquantized tensors take their factors exactly: the weight of a norm is rounded to its stored type first, and the factor
becomes the quotient of old and new value. If biases or unquantized matrices are involved, factors are powers of two. A
pair whose factors still cannot be stored is skipped, with an event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quantforge.architectures import FoldKind, SharedInput
from quantforge.events import Event
from quantforge.model.block import DecoderBlock
from quantforge.model.scale_folding import (
    expand_heads,
    fold_scale,
    nearest_exact_scale,
    shrink_heads,
)
from quantforge.model.statistics import Statistics

MAX_FACTOR = 1024.0  # largest ratio of a factor to the mean: keeps norms in the range of float16
TOLERANCE = 2.0**-20  # relative error of a stored value: allows for float32 arithmetic only


def fold_if_storable(
    block: DecoderBlock, shared: SharedInput, quantized: Collection[str], scale: Tensor
) -> Event | None:
    """Fold factors into a pair; if they cannot be stored, change nothing and return an event."""
    if problem := storage_obstacle(block, shared, quantized, scale):
        return Event("scale-fold-skipped", f"{block.name}.{shared.key}", problem)
    fold_scale(block, shared, scale)
    return None


def join_tied_columns(
    block: DecoderBlock, shared: SharedInput, values: Tensor, join: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply ``join`` to the values ``[in]`` of columns that share a factor; return the result for each column.

    ``join`` maps ``[kv_heads, query heads of each, head]`` to ``[kv_heads, head]``.
    """
    if not shared.heads:
        return values
    sizes = block.dimensions
    return expand_heads(sizes, join(values.reshape(sizes.kv_heads, -1, sizes.head)).reshape(-1))


def rescale_statistics(statistics: Statistics, scale: Tensor) -> Statistics:
    """Return the statistics of ``x / scale`` for ``scale`` ``[in]``, given those of ``x``; the histogram is dropped."""
    squares, hessian, peaks = statistics.squares, statistics.hessian, statistics.peaks
    return replace(
        statistics,
        squares=None if squares is None else squares / scale.square(),
        hessian=None if hessian is None else hessian / scale[:, None] / scale,
        peaks=None if peaks is None else peaks / scale,
        histogram=None,
    )


def storable_factors(
    block: DecoderBlock, shared: SharedInput, logs: Tensor, powers_of_two: bool
) -> Tensor:
    """Return storable factors ``[in]`` close to ``2^logs``, normalized to a geometric mean of about 1.

    Args:
        block: the block.
        shared: the activation.
        logs: binary logarithms of the factors, ``[in]``.
        powers_of_two: whether to round the factors to powers of two.
    """
    logs = logs - logs.mean()
    scale = torch.exp2(logs.round() if powers_of_two else logs).clamp(1 / MAX_FACTOR, MAX_FACTOR)
    return nearest_exact_scale(block, shared, scale)


def storage_obstacle(
    block: DecoderBlock, shared: SharedInput, quantized: Collection[str], scale: Tensor
) -> str:
    """Return which unquantized parameter could not store its value after the fold; "" if there is none."""
    for name, value, offset in _unquantized_after_fold(block, shared, quantized, scale):
        difference = (block.as_stored(name, value) - value).abs()
        if not bool((difference <= TOLERANCE * (value.abs() + offset)).all()):
            return f"{name} stays {block.dtype_of(name)} and cannot store the factors"
    return ""


def needs_powers_of_two(
    block: DecoderBlock, shared: SharedInput, quantized: Collection[str]
) -> bool:
    """Return whether any unquantized tensor except a norm's weight must store its product with the factors."""
    ones = block.weight(shared.key).new_ones(block.weight(shared.key).shape[1])
    num_unquantized = sum(1 for _ in _unquantized_after_fold(block, shared, quantized, ones))
    return num_unquantized > (
        shared.scale_fold is not None and shared.scale_fold.kind is not FoldKind.ROWS
    )


def _unquantized_after_fold(
    block: DecoderBlock, shared: SharedInput, quantized: Collection[str], scale: Tensor
) -> Iterator[tuple[str, Tensor, float]]:
    """Yield name, new value and norm offset of each unquantized parameter that takes a factor."""
    scale_fold = shared.scale_fold
    assert scale_fold is not None
    channels = shrink_heads(block.dimensions, scale) if shared.heads else scale
    weight, bias = f"{scale_fold.module}.weight", f"{scale_fold.module}.bias"
    rows = block.rows(scale_fold.module, scale_fold.rows)
    if scale_fold.kind is not FoldKind.ROWS:
        offset = 1.0 if scale_fold.kind is FoldKind.NORM_PLUS_ONE else 0.0
        yield weight, (block.parameter(weight) + offset) / channels - offset, offset
    elif scale_fold.module not in quantized:
        yield weight, block.weight(scale_fold.module)[rows] / channels[:, None], 0.0
    if block.has_parameter(bias):
        yield bias, block.parameter(bias)[rows] / channels, 0.0
    for linear in shared.readers:
        if linear not in quantized:
            yield f"{linear}.weight", block.weight(linear) * scale, 0.0
