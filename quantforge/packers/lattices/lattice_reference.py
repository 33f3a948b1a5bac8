"""Rows of lattice types quantized as ggml's own quantizers do, to the last bit.

One difference is meant: where a group of IQ3_S is all zero and others of its block are not, ggml writes the indices of
the groups after it into the places of the group before. Such a block does not hold the weights; here it does.
"""

from __future__ import annotations

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantforge.errors import InputError
from quantforge.grids import SUPERBLOCKS
from quantforge.packers.lattices import reference_loops, ternary_loops
from quantforge.packers.lattices.lattice_types import LATTICES
from quantforge.packers.lattices.neighbours import neighbours
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme

Array = NDArray[numpy.float32]
NEED_IMPORTANCE = frozenset(
    {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs"}
)  # of llama-quantize
_ALWAYS, _OFF, _ALL = reference_loops.ALWAYS, reference_loops.OFF_GRID, reference_loops.ALL_IF_ANY
# Tries to either side, whether they begin at a fit, which points are chosen again; then step, least maximum, fudge.
_SEARCHES = {
    "iq2_xxs": ((6, True, _ALWAYS), (0.1, 1e-15, 1.0)),
    "iq2_xs": ((9, False, _OFF), (0.1, 1e-15, 1.0)),
    "iq2_s": ((9, False, _OFF), (0.1, 1e-8, 0.9875)),
    "iq3_xxs": ((15, False, _OFF), (0.2, 1e-8, 1.0125)),
    "iq3_s": ((9, False, _ALL), (0.2, 1e-45, 1.033)),
}
_TERNARY = {"iq1_s": (1e-12, 1.125), "iq1_m": (1e-7, 1.1125)}
_ONE_MEAN = frozenset({"iq2_xxs", "iq2_xs"})  # of the others the mean square counts twice


def quantize(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> QuantizedTensor:
    """Return what ggml makes of ``weight`` ``[rows, in]`` float32; ``importance`` ``[in]``.

    Raises:
        InputError: the type needs an importance.
    """
    grid = scheme.grid
    if importance is None and grid in NEED_IMPORTANCE:
        raise InputError(
            f"--scales reference: ggml has no {grid.upper()} without an importance of the columns",
            "--calibration TEXT, or --imatrix FILE",
        )
    x = numpy.ascontiguousarray(weight.cpu().float().numpy()).reshape(-1, 256)
    blocks = weight.shape[1] // 256
    given = None if importance is None else importance.cpu().float().numpy().reshape(blocks, 256)
    w = _weights(x, grid, given)
    codes, parameters = (_ternary if grid in _TERNARY else _magnitudes)(x, w, grid)
    rows = len(weight)
    shaped = {key: value.reshape(rows, -1).to(weight.device) for key, value in parameters.items()}
    return QuantizedTensor(codes.reshape(rows, -1).to(weight.device), shaped, scheme)


def _weights(x: Array, grid: str, importance: Array | None) -> Array:
    """Return the weights of all values, in the arithmetic of ggml."""
    squares = x * x
    sums = numpy.zeros(len(x), numpy.float32)
    for column in range(256):  # in order
        sums += squares[:, column]
    mean = (sums if grid in _ONE_MEAN else sums + sums) / numpy.float32(256)
    if importance is not None:
        rows = len(x) // len(importance)
        return numpy.sqrt(mean[:, None] + squares) * numpy.tile(importance, (rows, 1))
    return numpy.float32(0.25) * mean[:, None] + squares if grid == "iq2_s" else squares


def _magnitudes(x: Array, w: Array, grid: str) -> tuple[Tensor, dict[str, Tensor]]:
    lattice, block = LATTICES[grid], SUPERBLOCKS[grid]
    (tries, positive, again), numbers = _SEARCHES[grid]
    groups = 256 // block.group
    digits, signs = numpy.empty(x.shape, numpy.uint8), numpy.empty((len(x), 32), numpy.uint8)
    scales, levels = (
        numpy.empty((len(x), groups), numpy.float32),
        numpy.empty((len(x), groups), numpy.uint8),
    )
    units, tables = numpy.empty(len(x), numpy.float32), neighbours(grid)
    base = len(lattice.values)
    form = (block.group, lattice.width, base, lattice.signs == "even", tries, positive, again)
    reference_loops.search(
        x, w, form, tuple(map(numpy.float32, numbers)), tuple(tables), digits, signs, scales, units, levels
    )  # fmt: skip
    keys = digits.reshape(len(x), -1, lattice.width).astype(numpy.int32)
    keys = keys @ (base ** numpy.arange(lattice.width)).astype(numpy.int32)
    index = tables.place[keys].reshape(len(x), -1, lattice.vectors)
    codes = (index << (numpy.arange(lattice.vectors, dtype=numpy.int32) * lattice.index_bits)).sum(
        2, dtype=numpy.int32
    )
    if lattice.columns == 4:
        signs = numpy.stack([signs & 15, signs >> 4], 2).reshape(len(x), -1)
    codes |= signs.astype(numpy.int32) << lattice.sign_place
    return torch.from_numpy(codes), _parameters(units, levels)


def _ternary(x: Array, w: Array, grid: str) -> tuple[Tensor, dict[str, Tensor]]:
    size, (least, fudge) = SUPERBLOCKS[grid].group, _TERNARY[grid]
    codes, lowered = numpy.empty((len(x), 32), numpy.int32), numpy.empty((len(x), 32), numpy.bool_)
    levels, units = (
        numpy.empty((len(x), 256 // size), numpy.uint8),
        numpy.empty(len(x), numpy.float32),
    )
    tables = tuple(neighbours(grid))
    ternary_loops.search(
        x,
        w,
        size,
        numpy.float32(least),
        numpy.float32(fudge),
        tables,
        codes,
        lowered,
        levels,
        units,
    )
    parameters = _parameters(units, levels)
    if grid == "iq1_m":
        codes |= lowered.astype(numpy.int32) << LATTICES[grid].sign_place
    else:
        parameters["shifts"] = torch.from_numpy(lowered[:, ::4].astype(numpy.uint8))
    return torch.from_numpy(codes), parameters


def _parameters(units: Array, levels: NDArray[numpy.uint8]) -> dict[str, Tensor]:
    return {"d": torch.from_numpy(units).half(), "scales": torch.from_numpy(levels)}
