"""Shared steps of all rounders: check matrices, stack them, fit parameters, and report lost values.

All matrices are ``[out, in]``; parameters are those of a packer, by name, with one row per row of the matrix or a
single row for the whole matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import fsum

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.events import Event
from quantforge.numerics.values import all_finite
from quantforge.packers import get_packer
from quantforge.packers.ggml.search import MIN_FLOAT16
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme

DOMINANCE_RATIO = 20  # times the root mean square of a group, see `_dominated_group_events`
# Share of the norm of a group: no weight of a small group is 20 times its root mean square
MAX_DOMINANCE_SHARE = 0.95
PREFIX_COLUMNS = 32  # leading values that mostly suffice to show that a row is not 0
LOST_SIGNAL_SHARE = 0.9  # of the squares of the others: such an error leaves no signal


def to_finite_float32(name: str, weight: Tensor) -> Tensor:
    """Return ``weight`` in float32; raise `InputError` naming the first value that is not finite."""
    weight = weight.detach().float()
    if not all_finite(weight):
        row, column = (~weight.isfinite()).nonzero()[0].tolist()
        raise InputError(
            f"{name}: the value at [{row}, {column}] is {weight[row, column].item()}",
            "the checkpoint is damaged: fetch it again, or keep this tensor with --ignore",
            tensor=name,
        )
    return weight


def stack_rows(matrices: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of all ``matrices``; a single piece is returned as it is."""
    return matrices[0] if len(matrices) == 1 else torch.cat([*matrices])


def slice_parameters(parameters: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Return the parameters of some rows; a parameter of the whole matrix is returned unchanged."""
    return {key: value if len(value) == 1 else value[rows] for key, value in parameters.items()}


def fit_parameters(
    name: str, weight: Tensor, scheme: Scheme, importance: Tensor | None, *, search: bool
) -> dict[str, Tensor]:
    """Return the parameters fitted by the scheme's packer; errors mention ``name``."""
    with add_tensor_name(name):
        return get_packer(scheme).fit(weight, scheme, importance, search=search)


@contextmanager
def add_tensor_name(name: str) -> Iterator[None]:
    """Add the ``name`` of a tensor to an `InputError` raised inside this context."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error.message}", error.hint, tensor=name) from error


def ratio(errors: Tensor, sizes: Tensor) -> float:
    """Return ``sum(errors) / sum(sizes)`` of 1-D tensors, 0 if sizes are 0; independent of the number of threads."""
    size = fsum(sizes.tolist())
    return fsum(errors.tolist()) / size if size else 0.0


def loss_events(
    name: str, weight: Tensor, tensor: QuantizedTensor, decoded: Tensor
) -> tuple[Event, ...]:
    """Return events for values lost completely: rows whose scales underflowed, groups dominated by one large weight."""
    return (
        *_underflow_events(name, weight, tensor, decoded),
        *_dominated_group_events(name, weight, tensor, decoded),
    )


def _underflow_events(
    name: str, weight: Tensor, tensor: QuantizedTensor, decoded: Tensor
) -> tuple[Event, ...]:
    """Return an event if nonzero rows, or ggml blocks, decode to zero because their scales underflowed."""
    block = tensor.scheme.block
    unit = tensor.parameters.get("d", tensor.parameters.get("scales")) if block else None
    # Rows with larger scales may legitimately round to zero
    is_tiny = None if unit is None else unit.abs() <= MIN_FLOAT16
    if is_tiny is not None and not bool(is_tiny.any()):
        return ()
    columns = block.columns if block else weight.shape[1]
    runs = decoded.view(len(decoded), -1, columns)
    underflowed = ~runs[..., :PREFIX_COLUMNS].any(2)
    if is_tiny is not None:
        underflowed &= is_tiny
    if bool(underflowed.any()):  # only rows with leading zeros are examined completely
        underflowed[underflowed.clone()] = weight.view(runs.shape)[underflowed].any(1) & ~runs[
            underflowed
        ].any(1)
    if not bool(underflowed.any()):
        return ()
    message = (
        f"{int(underflowed.sum())} {'blocks' if block else 'rows'} are below {tensor.scheme.scale}"
    )
    return (Event("scale-clamped", name, f"{message} and decode to 0"),)


def _dominated_group_events(
    name: str, weight: Tensor, tensor: QuantizedTensor, decoded: Tensor
) -> tuple[Event, ...]:
    """Return an event if a weight is so large that the others of its group are rounded to zero.

    Errors relative to the whole group do not show this: they are small, because the large weight is preserved.
    """
    size = tensor.scheme.group_size(weight.shape[1])
    if weight.shape[1] % size:
        return ()
    groups = weight.view(len(weight), -1, size)
    minima, maxima = groups.amin(-1), groups.amax(-1)  # aminmax takes five times as long
    norms = torch.linalg.vector_norm(groups, dim=-1)
    is_dominated = torch.maximum(maxima, -minima) > norms * min(
        DOMINANCE_RATIO / size**0.5, MAX_DOMINANCE_SHARE
    )
    groups, values = groups[is_dominated], decoded.view(len(weight), -1, size)[is_dominated]
    mask = torch.ones_like(groups).scatter_(1, groups.abs().argmax(1, keepdim=True), 0)
    groups, errors = groups * mask, (values - groups) * mask
    loses_signal = errors.square().sum(1) > LOST_SIGNAL_SHARE * groups.square().sum(1)
    if not bool(loses_signal.any()):
        return ()
    message = (
        f"{int(loses_signal.sum())} groups of {size} hold a weight beside which the others are lost:"
        " smaller groups or more bits keep them"
    )
    return (Event("group-outlier", name, message),)
