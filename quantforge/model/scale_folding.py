"""Fold a factor for each channel out of the linears that read an activation into what produces it.

For ``y = W x`` and any positive ``s``, ``y = (W diag(s)) (x / s)``. The columns of every reader are multiplied by
``s``; the producer of ``x`` is divided by it, so that the function of the model stays what it was. A norm divides its
weight and bias; gemma multiplies by ``1 + w``, which becomes ``(1 + w) / s - 1``; a linear divides its output rows and
their bias, which is exact where only channel-wise products, positive-homogeneous functions (ReLU) or weighted means
over positions (attention) lie between.

Under grouped-query attention one value channel feeds the same channel of several query heads, so that its factor has to
be shared by them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.architectures import FoldKind, ScaleFold, SharedInput
from quantforge.architectures.dimensions import Dimensions
from quantforge.model.block import DecoderBlock


def fold(block: DecoderBlock, shared: SharedInput, scale: Tensor) -> tuple[str, ...]:
    """Divide the producer of an activation by ``scale`` and multiply the columns of its readers.

    Args:
        block: the block; it is changed in place.
        shared: the activation; its ``scale_fold`` must not be None.
        scale: ``[in_features]``, positive; constant over the query heads of a key/value head where ``shared.heads``.

    Returns:
        Names (relative to the block) of all parameters that changed, those of the scale fold first.
    """
    scale_fold = _required_fold(shared)
    _check(block, shared, scale)
    channels = shrink_heads(block.dimensions, scale) if shared.heads else scale
    changed = _divide(block, scale_fold, channels)
    for linear in shared.readers:
        block.set_weight(linear, block.weight(linear) * scale)
        changed.append(f"{linear}.weight")
    return tuple(changed)


def representable(block: DecoderBlock, shared: SharedInput, scale: Tensor) -> Tensor:
    """Return the factor nearest to ``scale`` that leaves the absorbing norm in its stored type.

    A norm stored in bfloat16 is rounded after the division; with ``s' = w / round(w / s)`` the fold is exact although
    the norm is rounded. Channels whose weight is zero keep their factor. Linears are about to be quantized: for them
    the factor is returned as it is.
    """
    scale_fold = _required_fold(shared)
    if scale_fold.kind is FoldKind.ROWS:
        return scale
    name = f"{scale_fold.module}.weight"
    offset = 1.0 if scale_fold.kind is FoldKind.NORM_PLUS_ONE else 0.0
    weight = block.parameter(name)
    gain = weight + offset
    rounded = block.as_stored(name, gain / scale - offset) + offset
    exact = gain / rounded
    return torch.where(torch.isfinite(exact) & (exact > 0), exact, scale)


def expand_heads(dimensions: Dimensions, channels: Tensor) -> Tensor:
    """Spread a factor ``[kv]`` of value channels over the query heads that read them: ``[q]``."""
    heads = channels.reshape(dimensions.kv_heads, 1, dimensions.head)
    return heads.expand(-1, dimensions.heads // dimensions.kv_heads, -1).reshape(-1)


def shrink_heads(dimensions: Dimensions, scale: Tensor) -> Tensor:
    """Undo `expand_heads`: of each key/value head, the factor of its first query head."""
    groups = dimensions.heads // dimensions.kv_heads
    return scale.reshape(dimensions.kv_heads, groups, dimensions.head)[:, 0].reshape(-1)


def _required_fold(shared: SharedInput) -> ScaleFold:
    if shared.scale_fold is None:
        raise ValueError(f"{shared.key}: nothing absorbs a scale of its input")
    return shared.scale_fold


def _check(block: DecoderBlock, shared: SharedInput, scale: Tensor) -> None:
    width = block.weight(shared.key).shape[1]
    if scale.shape != (width,) or not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(f"{block.name}.{shared.key}: {width} positive factors are needed")
    if shared.heads:
        spread = expand_heads(block.dimensions, shrink_heads(block.dimensions, scale))
        if not torch.equal(spread, scale):
            raise ValueError(
                f"{block.name}.{shared.key}: query heads of one value head need one factor"
            )


def _divide(block: DecoderBlock, scale_fold: ScaleFold, channels: Tensor) -> list[str]:
    weight, bias = f"{scale_fold.module}.weight", f"{scale_fold.module}.bias"
    rows = (
        block.rows(scale_fold.module, scale_fold.rows)
        if scale_fold.kind is FoldKind.ROWS
        else slice(None)
    )
    if scale_fold.kind is FoldKind.NORM:
        block.set_parameter(weight, block.parameter(weight) / channels)
    elif scale_fold.kind is FoldKind.NORM_PLUS_ONE:
        block.set_parameter(weight, (block.parameter(weight) + 1) / channels - 1)
    else:
        made = block.weight(scale_fold.module)
        made[rows] = made[rows] / channels[:, None]
    if not block.has(bias):
        return [weight]
    offset = block.parameter(bias)
    offset[rows] = offset[rows] / channels
    return [weight, bias]
