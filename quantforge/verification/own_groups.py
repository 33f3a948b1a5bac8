"""Groups that a matrix was rounded in, where its format repeats their scales for shorter ones.

An export states one scale for a row, or for a long group, as equal scales of all groups that its format has. The
yardstick has to round in the groups that were meant: with the shorter ones it would be better by far.
"""

from __future__ import annotations

from dataclasses import replace

from quantforge.formats.convert import as_integers
from quantforge.grids import PerGroup, PerTensor, Row
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme


def own_groups(found: QuantizedTensor) -> Scheme:
    """Return the scheme of a tensor with the longest groups whose scales, zero points and minima its own repeat."""
    tensor = as_integers(found)
    scheme, shape = tensor.scheme, tensor.scheme.parameter_shape(tensor.shape)
    stored = [tensor.parameters.get(key) for key in ("scales", "zeros", "mins")]
    values = [value.float() for value in stored if value is not None]
    if not scheme.integer or not isinstance(scheme.granularity, PerGroup | Row) or not values:
        return found.scheme
    if any(tuple(value.shape) != shape for value in values):
        return found.scheme
    if all(bool((value == value[0, 0]).all()) for value in values):
        return replace(scheme, granularity=PerTensor())
    rows, groups = shape
    for count in range(groups, 1, -1):
        if groups % count == 0 and all(
            bool((runs == runs[..., :1]).all())
            for runs in (value.view(rows, -1, count) for value in values)
        ):
            whole = scheme.group_size(tensor.shape[1]) * count
            return replace(scheme, granularity=Row() if count == groups else PerGroup(whole))
    return found.scheme
