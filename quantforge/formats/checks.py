"""Checks of stored values that all formats share: scales are sound, group numbers are in range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.errors import Fault, InputError
from quantforge.formats.contradictions import denied
from quantforge.formats.headers import described, require
from quantforge.grids import PerGroup, Tile
from quantforge.plans import StoredTensor
from quantforge.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor


def positive(name: str, scales: Tensor) -> Tensor:
    """Return scales of any type as float32, if they are finite and positive; else raise `InputError`."""
    scales = scales.float()
    if not bool((scales > 0).all()) or not bool(scales.isfinite().all()):
        finite = bool(scales.isfinite().all())
        raise InputError(
            f"{name}: {scales.flatten().tolist()[:4]} is no scale",
            tensor=name,
            fault=Fault.SCALE if finite else Fault.NOT_FINITE,
        )
    return scales


def scalar(name: str, scale: Tensor) -> Tensor:
    """Return a single positive scale, in whatever shape and type it is stored, as float32 ``[1, 1]``."""
    flat = positive(name, scale).reshape(-1)
    if len(flat) != 1:
        raise InputError(f"{name}: {flat.tolist()[:4]} is no scale", tensor=name, fault=Fault.SCALE)
    return flat.view(1, 1)


def by_group_index(
    tensor: QuantizedTensor, index: Tensor, name: str, *, scattered: bool | None = None
) -> QuantizedTensor:
    """Apply the group number of each column (``g_idx``) to a tensor read as if it had none.

    Scattered groups (``desc_act``) become groups of one column, with each column's own copy of its
    scale: exact, readable by everything, and storable by nothing, which is how it should be.

    Raises:
        InputError: a number is out of range, or the index scatters groups although the configuration says that it
            does not (``scattered`` False): engines then leave the index out.
    """
    import torch

    from quantforge.packers.tensor import QuantizedTensor as Quantized

    columns = tensor.shape[1]
    require(described({name: index}), [StoredTensor(name, "I32", (columns,))])
    groups = tensor.scheme.groups(columns)
    if bool((index < 0).any()) or bool((index >= groups).any()):
        raise InputError(f"{name}: a group number is outside of 0..{groups - 1}", tensor=name)
    plain = torch.arange(columns, dtype=index.dtype) // tensor.scheme.group_size(columns)
    if torch.equal(index, plain):
        return tensor
    if scattered is False:
        raise denied("the groups are runs of columns", f"{name} scatters them", name)
    scheme = Scheme(tensor.scheme.grid, PerGroup(1), tensor.scheme.zero, tensor.scheme.scale)
    spread = {key: value[:, index.long()] for key, value in tensor.parameters.items()}
    return Quantized(tensor.codes, spread, scheme)


def sound(tensor: QuantizedTensor, name: str) -> QuantizedTensor:
    """Return ``tensor`` if its scales (stored as ``name``) are finite, and those of integers 0 only for zeros.

    Where minima are stored, a group of scale 0 is its minimum, whatever its codes are.

    Raises:
        InputError: naming the tensor and the position of the first other scale.
    """
    if "exponents" in tensor.parameters:  # 255 stands for no number
        exponents = tensor.parameters["exponents"]
        scales = exponents.float().masked_fill(exponents == 255, float("nan"))
    else:
        scales = tensor.parameters["scales"].float()
    finite(name, scales)
    if tensor.scheme.integer and "mins" not in tensor.parameters and bool((scales == 0).any()):
        _refuse_lost(tensor, name)
    return tensor


def finite(name: str, parameters: Tensor, what: str = "scale") -> Tensor:
    """Return ``parameters`` ``[rows, groups]``, stored as ``name``, if they are finite.

    Raises:
        InputError: naming the tensor and the position of the first that is not.
    """
    bad = ~parameters.isfinite()
    if bool(bad.any()):
        row, group = bad.nonzero()[0].tolist()
        raise InputError(
            f"{name}: {what} {parameters[row, group].item()} of row {row}, group {group}",
            "the checkpoint is damaged, or its scales overflowed when it was written",
            tensor=name,
            fault=Fault.NOT_FINITE,
        )
    return parameters


def whole_tiles(
    scheme: Scheme, columns: int, parameters: Mapping[str, Tensor]
) -> tuple[Scheme, dict[str, Tensor]]:
    """Return the same numbers in narrower tiles that divide the columns, where the last tile of a row was cut off."""
    tile = scheme.granularity
    if not isinstance(tile, Tile) or not columns % tile.columns:
        return scheme, dict(parameters)
    size = math.gcd(tile.columns, columns)
    spread = {
        key: value.repeat_interleave(tile.columns // size, 1)[:, : columns // size].contiguous()
        for key, value in parameters.items()
    }
    return replace(scheme, granularity=Tile(tile.rows, size)), spread


def _refuse_lost(tensor: QuantizedTensor, name: str) -> None:
    """Refuse a group that decodes to zeros although its codes are not zeros."""
    empty = tensor.parameters["scales"] == 0
    rows = empty.any(dim=1).nonzero().flatten()
    codes = tensor.codes[rows].view(len(rows), empty.shape[1], -1)
    zeros = tensor.parameters["zeros"][rows].unsqueeze(-1) if "zeros" in tensor.parameters else 0
    lost = (codes != zeros).any(dim=-1) & empty[rows]
    if bool(lost.any()):
        row, group = lost.nonzero()[0].tolist()
        raise InputError(
            f"{name}: scale 0 for non-zero codes in row {int(rows[row])}, group {group}",
            "the scale underflowed when the checkpoint was written",
            tensor=name,
            fault=Fault.SCALE,
        )
