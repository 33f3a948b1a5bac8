"""Uniform integer grids with a stored minimum: ``code * scale + minimum``, as MLX has them.

The plain fit is that of ``mx.quantize``: code 0 is the end of the range that is farther from 0 (the scale is negative
where that is the upper end), and the step is changed a little so that 0 lies on the grid. ``search`` takes the scale
and zero point that `quantforge.packers.integer` finds, and stores the minimum ``-zero * scale``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.grids import ScaleType, Zero
from quantforge.packers import Points, integer
from quantforge.packers.integer import SCALE_DTYPES
from quantforge.packers.moments import Refit
from quantforge.packers.tensor import QuantizedTensor, Statement, unsigned
from quantforge.scheme import Scheme

LEAST = 1e-7  # step of a group of equal weights, as in MLX


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose ``scales`` and ``mins``, in the stored type, of ``weight`` ``[out, in]``; see `Packer`.

    Raises:
        InputError: a scale or a minimum is beyond the largest number of its stored type.
    """
    dtype = SCALE_DTYPES[scheme.scale or ScaleType.F16]
    if search:
        found = integer.fit(weight, replace(scheme, zero=Zero.INT), importance, search=True)
        mins = -found["zeros"].float() * found["scales"].float()
        return {"scales": found["scales"], "mins": _stored(mins, dtype)}
    groups = weight.reshape(len(weight), scheme.groups(weight.shape[1]), -1)
    low, high = groups.amin(-1), groups.amax(-1)
    step = ((high - low) / ((1 << scheme.bits) - 1)).clamp(min=LEAST)
    turned = low.abs() <= high.abs()
    step = torch.where(turned, -step, step)
    edge = torch.where(turned, high, low)
    whole = (edge / step).round()
    scales = torch.where(whole != 0, edge / torch.where(whole == 0, 1, whole), step)
    mins = torch.where(whole != 0, edge, 0)
    integer.stored(scales.abs(), dtype)  # refuses what is beyond the type
    return {"scales": scales.to(dtype), "mins": _stored(mins, dtype)}


def _stored(mins: Tensor, dtype: torch.dtype) -> Tensor:
    """Round minima to ``dtype``; raise `InputError` where one is beyond its largest number."""
    found = mins.to(dtype)
    if not bool(found.isfinite().all()):
        raise InputError(
            f"a minimum of {mins.abs().max().item():.3g} is beyond the range of {dtype}",
            "store scales and minima as bf16, e.g. --scheme int4:g64:min:bf16",
        )
    return found


def encode(
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the nearest codes, uint8; ``columns`` is the run of columns that ``weight`` holds."""
    scales = integer.by_column(parameters["scales"], scheme, columns).float()
    mins = integer.by_column(parameters["mins"], scheme, columns).float()
    codes = (weight - mins) / torch.where(scales == 0, 1, scales)
    return codes.round_().clamp_(0, (1 << scheme.bits) - 1).to(torch.uint8)


def decode(
    codes: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return ``code * scale + minimum`` in float32; ``columns`` as in `encode`."""
    scales = integer.by_column(parameters["scales"], scheme, columns).float()
    return (codes.float() * scales).add_(integer.by_column(parameters["mins"], scheme, columns))


def points(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> Points | None:
    """Return the values that ``columns`` can take."""
    return integer.points(parameters, scheme, columns)


def refits(scheme: Scheme, in_features: int) -> Sequence[Refit]:  # noqa: ARG001
    """Return nothing: minima stay as they are fitted."""
    return ()


def stated(tensor: QuantizedTensor) -> Statement:
    """State a tensor to the kernels, which subtract minima."""
    parameters = {**tensor.parameters, "mins": -tensor.parameters["mins"]}
    return Statement("int", unsigned(tensor), parameters)
