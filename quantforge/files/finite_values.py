"""Values that are no finite numbers: found as tensors are read, and named with their places."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.errors import Fault, InputError

if TYPE_CHECKING:
    import torch

_ELEMENTS = 2**20  # at a time
_BOUNDS = ("_min", "_max")  # end their names


def scan_finite(
    name: str,
    tensor: torch.Tensor,
    file: Path | None = None,
    *,
    first: int = 0,
    rows: int | None = None,
) -> None:
    """Refuse a tensor (or what was read of its ``rows``, from ``first`` on) with a NaN or an infinity, without a copy.

    A single number that is a bound, as of inputs that a linear of a tower clips, may be infinite: it bounds nothing.

    Raises:
        InputError: naming the tensor, the value and its position.
    """
    import torch

    if not tensor.is_floating_point():
        return
    if tensor.dim() == 0 and name.endswith(_BOUNDS) and not torch.isnan(tensor):
        return
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _ELEMENTS):
        chunk = flat[start : start + _ELEMENTS]
        if chunk.element_size() == 1:
            chunk = chunk.float()  # fp8 has no reductions
        low, high = torch.aminmax(chunk)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            found = int(torch.isfinite(chunk).logical_not().nonzero()[0])
            shape = tuple(tensor.shape if rows is None else (rows, *tensor.shape[1:]))
            position = first * math.prod(shape[1:]) + start + found
            raise _not_finite(name, shape, position, float(chunk[found]), file)


def _not_finite(
    name: str, shape: tuple[int, ...], position: int, value: float, file: Path | None
) -> InputError:
    place: list[int] = []
    for size in reversed(shape):
        position, index = divmod(position, size)
        place.insert(0, index)
    where = f"{file}: " if file else ""
    return InputError(
        f"{where}tensor {name!r} holds {value} at {place} of {list(shape)}",
        "the weights are damaged, or were saved after training diverged: fetch them again",
        file=str(file) if file else None,
        tensor=name,
        fault=Fault.NOT_FINITE,
    )
