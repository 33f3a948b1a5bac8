"""Plain rounding as a yardstick: a matrix rounded to nearest on the grid of another, with the best scales of its own.

A fixed number of decibels would say little: what a scheme costs depends on the matrix, its outliers and the size of its
groups. So the matrix itself is rounded once more, by the packers of this program, and what an artifact lost is judged
against what that loses: of the whole, of each row, column and group.
"""

from __future__ import annotations

from torch import Tensor

from quantforge.errors import InputError
from quantforge.packers import packer_of
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme

STORED = 2.0**-9  # relative: what storing a factor, a scale or a value in 16 bits costs


def rounded(target: Tensor, found: QuantizedTensor, scheme: Scheme) -> Tensor:
    """Round ``target`` ``[out, in]`` (float32) by ``scheme``; a copy of it where that cannot hold it.

    ``found`` only says which outlier columns are kept: where groups are scattered, its scheme has one column per group.
    """
    packer = packer_of(scheme)
    try:
        parameters = packer.fit(target, scheme, search=_pays(scheme))
    except InputError:
        return target.clone()
    codes = packer.encode(target, parameters, scheme)
    values = packer.decode(codes, parameters, scheme)
    columns = found.outlier_columns
    if columns is not None:
        values[:, columns] = target[:, columns]
    return values


def _pays(scheme: Scheme) -> bool:
    """Return whether searched scales lose noticeably less: only below 8 bits."""
    return scheme.weight_bits < 8
