"""Checks of codes by themselves, without a source.

A scale that is wrong by a tenth cannot be found in this way. But no trained matrix has a column or row in which every
code is the same and does not stand for zero, and no two matrices have the same codes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from quantforge.packers.tensor import QuantizedTensor

LEAST = 32  # codes of a column or row: with fewer a constant one is chance
ZERO = 0.1  # of the mean magnitude


def oddities(found: QuantizedTensor) -> Iterator[tuple[str, str]]:
    """Yield the check and what is odd about a tensor."""
    codes = found.codes
    if codes.dtype.is_floating_point:
        codes = codes.view(torch.uint8)
    for dim, what in ((0, "column"), (1, "row")):
        if codes.shape[dim] < LEAST:
            continue
        constant = codes.amin(dim) == codes.amax(dim)
        if bool(constant.any()) and (places := _not_zero(found, constant, dim)):
            more = f", and {len(places) - 1} more" if len(places) > 1 else ""
            yield "groups", f"{what} {places[0]} has the same code everywhere{more}"


def _not_zero(found: QuantizedTensor, constant: Tensor, dim: int) -> list[int]:
    """Return the numbers of constant columns (or rows) that stand for anything but zeros."""
    values = found.decode()
    sizes = values.abs().amax(dim)
    usual = float(values.abs().mean())
    places: list[int] = (constant & (sizes > ZERO * usual)).nonzero().flatten().tolist()
    return places


def digest(found: QuantizedTensor) -> str | None:
    """Return the digest of the codes; None where they are all the same."""
    codes = found.codes
    if codes.dtype.is_floating_point:
        codes = codes.view(torch.uint8)
    if bool((codes == codes.flatten()[0]).all()):
        return None
    return hashlib.sha256(codes.contiguous().numpy().tobytes()).hexdigest()
