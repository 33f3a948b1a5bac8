"""Checks of a tensor's blocks: a scale that is not finite destroys everything it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantforge.errors import Fault, InputError

if TYPE_CHECKING:
    from quantforge.packers.tensor import QuantizedTensor


def sound(tensor: QuantizedTensor, name: str) -> QuantizedTensor:
    """Return ``tensor`` if its parameters are finite.

    Raises:
        InputError: naming the tensor, the parameter and the row.
    """
    for key, value in tensor.parameters.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            row = int((~value.isfinite()).nonzero()[0][0])
            raise InputError(
                f"{name}: {key} of row {row} is not finite",
                "the file is damaged, or a scale overflowed when it was written",
                tensor=name,
                fault=Fault.NOT_FINITE,
            )
    return tensor
