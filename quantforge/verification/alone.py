"""Checks of codes by themselves, without a source.

A scale that is wrong by a tenth cannot be found in this way. But no trained matrix has a column or row in which every
code is the same and does not stand for zero, and no two matrices have the same codes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from quantforge.grids import Zero
from quantforge.packers.tensor import QuantizedTensor

LEAST = 32  # codes of a column or row: with fewer a constant one is chance
ZERO = 0.1  # of the mean magnitude
LARGEST_SCALE = 2.0**14  # of the median scale of its tensor
SHIFTED = 0.55  # steps by which the median group is off under the wrong convention


def odd_scales(found: QuantizedTensor) -> Iterator[str]:
    """Yield a text for scales far above all others, and for scales that are all zero under codes that differ."""
    scales = found.parameters.get("scales")
    if scales is None:
        return
    sizes = scales.float().abs().flatten()
    typical = float(sizes.median())
    if typical > 0 and float(sizes.max()) > LARGEST_SCALE * typical:
        yield f"scale {float(sizes.max()):.3g}, the median is {typical:.3g}"
    if typical == 0 and bool((sizes == 0).all()) and bool((found.codes != found.codes[0, 0]).any()):
        yield "all scales are zero"


def odd_zeros(found: QuantizedTensor) -> Iterator[tuple[str, str]]:
    """Yield the check and a text where the zero points of 3 to 6 bits are off by one.

    Trained weights are centred on zero, so the mean of the median group is less than `SHIFTED` steps off.
    """
    zeros = found.parameters.get("zeros")
    # At 7 and 8 bits a step is less than the mean of many a healthy group.
    if zeros is None or not 3 <= found.scheme.bits <= 6 or found.scheme.zero is not Zero.INT:
        return
    rows, groups = zeros.shape
    mean = found.codes.view(rows, groups, -1).double().mean(-1) - zeros.double()
    shift = float(mean.median())
    if abs(shift) > SHIFTED:
        text = f"the median group is {shift:+.2f} steps off zero: a zero point off by one"
        yield "zero-convention", text


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
    """Return the SHA-256 of the codes, in hex; None where they are all the same."""
    codes = found.codes
    if codes.dtype.is_floating_point:
        codes = codes.view(torch.uint8)
    if bool((codes == codes.flatten()[0]).all()):
        return None
    return hashlib.sha256(codes.contiguous().numpy().tobytes()).hexdigest()
