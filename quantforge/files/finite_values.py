"""Reject tensors with NaN or infinite values, naming their positions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.errors import Fault, InputError

if TYPE_CHECKING:
    import torch

_CHUNK_ELEMENTS = 2**20  # at a time
_BOUND_SUFFIXES = ("_min", "_max")  # end their names


def check_finite(
    name: str,
    tensor: torch.Tensor,
    file: Path | None = None,
    *,
    first: int = 0,
    rows: int | None = None,
) -> None:
    """Refuse a tensor that contains NaN or infinity, without making a copy.

    ``tensor`` may be a part of a larger one: then ``rows`` is the number of rows of the whole tensor, and ``first`` the
    index of the first row. A scalar bound, such as the input limits of a clipped linear layer, may be infinite.

    Raises:
        InputError: naming the tensor, the value and its position.
    """
    import torch

    if not tensor.is_floating_point():
        return
    if tensor.dim() == 0 and name.endswith(_BOUND_SUFFIXES) and not torch.isnan(tensor):
        return
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        chunk = flat[start : start + _CHUNK_ELEMENTS]
        if chunk.element_size() == 1:
            chunk = chunk.float()  # fp8 has no reductions
        low, high = torch.aminmax(chunk)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            index = int(torch.isfinite(chunk).logical_not().nonzero()[0])
            shape = tuple(tensor.shape if rows is None else (rows, *tensor.shape[1:]))
            position = first * math.prod(shape[1:]) + start + index
            raise _not_finite_error(name, shape, position, float(chunk[index]), file)


def _not_finite_error(
    name: str, shape: tuple[int, ...], position: int, value: float, file: Path | None
) -> InputError:
    indices: list[int] = []
    for size in reversed(shape):
        position, index = divmod(position, size)
        indices.insert(0, index)
    prefix = f"{file}: " if file else ""
    return InputError(
        f"{prefix}tensor {name!r} holds {value} at {indices} of {list(shape)}",
        "the weights are damaged, or were saved after training diverged: fetch them again",
        file=str(file) if file else None,
        tensor=name,
        fault=Fault.NOT_FINITE,
    )
