"""Fold per-channel scales of an activation into the linears that read it and into its producer.

For ``y = W x`` and any positive ``s``, ``y = (W diag(s)) (x / s)``. The columns of every reader are multiplied by ``s``
and the producer of ``x`` is divided by it, so that the function of the model does not change. A norm divides its weight
and bias; gemma multiplies by ``1 + w``, which becomes ``(1 + w) / s - 1``; a linear divides its output rows and their
bias, which is exact if only channel-wise products, positive-homogeneous functions (ReLU) or weighted means over
positions (attention) lie in between.

Under grouped-query attention one value channel feeds the same channel of several query heads, so these share one scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.architectures import FoldKind, ScaleFold, SharedInput
from quantforge.architectures.dimensions import Dimensions
from quantforge.model.block import DecoderBlock


def fold_scale(block: DecoderBlock, shared: SharedInput, scale: Tensor) -> tuple[str, ...]:
    """Divide the producer of an activation by ``scale`` and multiply the columns of its readers.

    Args:
        block: the block; its weights are changed in place.
        shared: the activation; its ``scale_fold`` must not be None.
        scale: ``[in_features]``, positive; constant over the query heads of a key/value head if ``shared.heads``.

    Returns:
        Names (relative to the block) of all changed parameters, those of the producer first.
    """
    scale_fold = _require_scale_fold(shared)
    _check_scale(block, shared, scale)
    channels = shrink_heads(block.dimensions, scale) if shared.heads else scale
    changed_names = _divide_producer(block, scale_fold, channels)
    for linear in shared.readers:
        block.set_weight(linear, block.weight(linear) * scale)
        changed_names.append(f"{linear}.weight")
    return tuple(changed_names)


def nearest_exact_scale(block: DecoderBlock, shared: SharedInput, scale: Tensor) -> Tensor:
    """Return the scale nearest to ``scale`` that a norm can take without rounding in its stored type.

    A norm stored in bfloat16 is rounded after the division; with ``s' = w / round(w / s)`` the fold is exact
    nevertheless. Channels whose weight is zero keep their scale. For linears, which will be quantized, the scale is
    returned
    unchanged.
    """
    scale_fold = _require_scale_fold(shared)
    if scale_fold.kind is FoldKind.ROWS:
        return scale
    name = f"{scale_fold.module}.weight"
    offset = 1.0 if scale_fold.kind is FoldKind.NORM_PLUS_ONE else 0.0
    weight = block.parameter(name)
    gain = weight + offset
    rounded_gain = block.as_stored(name, gain / scale - offset) + offset
    exact_scale = gain / rounded_gain
    return torch.where(torch.isfinite(exact_scale) & (exact_scale > 0), exact_scale, scale)


def expand_heads(dimensions: Dimensions, channels: Tensor) -> Tensor:
    """Repeat the scale ``[kv]`` of value channels for all query heads that read them, giving ``[q]``."""
    heads = channels.reshape(dimensions.kv_heads, 1, dimensions.head)
    return heads.expand(-1, dimensions.heads // dimensions.kv_heads, -1).reshape(-1)


def shrink_heads(dimensions: Dimensions, scale: Tensor) -> Tensor:
    """Undo `expand_heads`: return the scale of the first query head of each key/value head."""
    groups = dimensions.heads // dimensions.kv_heads
    return scale.reshape(dimensions.kv_heads, groups, dimensions.head)[:, 0].reshape(-1)


def _require_scale_fold(shared: SharedInput) -> ScaleFold:
    if shared.scale_fold is None:
        raise ValueError(f"{shared.key}: nothing absorbs a scale of its input")
    return shared.scale_fold


def _check_scale(block: DecoderBlock, shared: SharedInput, scale: Tensor) -> None:
    width = block.weight(shared.key).shape[1]
    if scale.shape != (width,) or not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(f"{block.name}.{shared.key}: {width} positive factors are needed")
    if shared.heads:
        expanded = expand_heads(block.dimensions, shrink_heads(block.dimensions, scale))
        if not torch.equal(expanded, scale):
            raise ValueError(
                f"{block.name}.{shared.key}: query heads of one value head need one factor"
            )


def _divide_producer(block: DecoderBlock, scale_fold: ScaleFold, channels: Tensor) -> list[str]:
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
        divided = block.weight(scale_fold.module)
        divided[rows] = divided[rows] / channels[:, None]
    if not block.has_parameter(bias):
        return [weight]
    offset = block.parameter(bias)
    offset[rows] = offset[rows] / channels
    return [weight, bias]
