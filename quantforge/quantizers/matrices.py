"""What every rounder does with matrices: check them, stack them, fit their parameters, and report what was lost.

All matrices are ``[out, in]``; parameters are those of a packer, by name, one row for each row of the matrix unless one
serves the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import fsum

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.events import Event
from quantforge.numerics.values import finite
from quantforge.packers import packer_of
from quantforge.packers.ggml.search import LEAST
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme

OUTSHONE = 20  # times the root mean square of a group: weights that are looked at, see `_outshone`
ALONE = 0.95  # of the norm of a group: no weight of a small group is 20 times its root mean square
GLANCE = 32  # values at the begin of a row that mostly show that not all are 0
LOST = 0.9  # of the squares of the others: an error of that size leaves no signal


def checked(name: str, weight: Tensor) -> Tensor:
    """Return ``weight`` in float32; raise `InputError` naming the first value that is not finite."""
    weight = weight.detach().float()
    if not finite(weight):
        row, column = (~weight.isfinite()).nonzero()[0].tolist()
        raise InputError(
            f"{name}: the value at [{row}, {column}] is {weight[row, column].item()}",
            "the checkpoint is damaged: fetch it again, or keep this tensor with --ignore",
            tensor=name,
        )
    return weight


def stacked(pieces: Sequence[Tensor]) -> Tensor:
    """Return the rows of all ``pieces`` as one matrix; a single one as it is."""
    return pieces[0] if len(pieces) == 1 else torch.cat([*pieces])


def of_rows(parameters: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Return the parameters of some rows; one that serves the whole matrix stays whole."""
    return {key: value if len(value) == 1 else value[rows] for key, value in parameters.items()}


def fitted(
    name: str, weight: Tensor, scheme: Scheme, importance: Tensor | None, *, search: bool
) -> dict[str, Tensor]:
    """Return the parameters that the scheme's packer fits; its errors get the ``name``."""
    with named(name):
        return packer_of(scheme).fit(weight, scheme, importance, search=search)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Give an `InputError` the ``name`` of the tensor that it is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error.message}", error.hint, tensor=name) from error


def ratio(errors: Tensor, sizes: Tensor) -> float:
    """Return ``sum(errors) / sum(sizes)`` of 1-D tensors, 0 where sizes are 0; the same for any number of threads."""
    size = fsum(sizes.tolist())
    return fsum(errors.tolist()) / size if size else 0.0


def losses(
    name: str, weight: Tensor, tensor: QuantizedTensor, decoded: Tensor
) -> tuple[Event, ...]:
    """Return events for what is lost altogether: rows whose scales underflowed, groups beside one large weight."""
    return (*_vanished(name, weight, tensor, decoded), *_outshone(name, weight, tensor, decoded))


def _vanished(
    name: str, weight: Tensor, tensor: QuantizedTensor, decoded: Tensor
) -> tuple[Event, ...]:
    """Return an event when rows, or blocks of ggml's, are not zero and decode to zero: their scales underflowed."""
    block = tensor.scheme.block
    unit = tensor.parameters.get("d", tensor.parameters.get("scales")) if block else None
    tiny = None if unit is None else unit.abs() <= LEAST  # a greater one may well round to zero
    if tiny is not None and not bool(tiny.any()):
        return ()
    columns = block.columns if block else weight.shape[1]
    runs = decoded.view(len(decoded), -1, columns)
    lost = ~runs[..., :GLANCE].any(2)
    if tiny is not None:
        lost &= tiny
    if bool(lost.any()):  # few have zeros at their begin, and only these are looked through
        lost[lost.clone()] = weight.view(runs.shape)[lost].any(1) & ~runs[lost].any(1)
    if not bool(lost.any()):
        return ()
    what = f"{int(lost.sum())} {'blocks' if block else 'rows'} are below {tensor.scheme.scale}"
    return (Event("scale-clamped", name, f"{what} and decode to 0"),)


def _outshone(
    name: str, weight: Tensor, tensor: QuantizedTensor, decoded: Tensor
) -> tuple[Event, ...]:
    """Return an event when a weight is so large that the others of its group are rounded away.

    Errors relative to the whole group cannot show that: they are small, because the large weight is kept.
    """
    size = tensor.scheme.group_size(weight.shape[1])
    if weight.shape[1] % size:
        return ()
    groups = weight.view(len(weight), -1, size)
    least, most = groups.amin(-1), groups.amax(-1)  # aminmax takes five times as long
    norms = torch.linalg.vector_norm(groups, dim=-1)
    found = torch.maximum(most, -least) > norms * min(OUTSHONE / size**0.5, ALONE)
    groups, values = groups[found], decoded.view(len(weight), -1, size)[found]
    others = torch.ones_like(groups).scatter_(1, groups.abs().argmax(1, keepdim=True), 0)
    groups, errors = groups * others, (values - groups) * others
    lost = errors.square().sum(1) > LOST * groups.square().sum(1)
    if not bool(lost.any()):
        return ()
    what = (
        f"{int(lost.sum())} groups of {size} hold a weight beside which the others are lost:"
        " smaller groups or more bits keep them"
    )
    return (Event("group-outshone", name, what),)
