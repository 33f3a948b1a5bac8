"""Rows of lattice types quantized as ggml's own quantizers do, to the last bit.

Of IQ1_M both shifts of a half that holds nothing but zeros lose the same, and ggml may take the other one.

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
from quantforge.packers.lattices.lattice_points import digits, points
from quantforge.packers.lattices.lattice_types import ALL_IF_ANY, ALWAYS, LATTICES, OFF_GRID
from quantforge.packers.lattices.neighbours import neighbours
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme

Array = NDArray[numpy.float32]
NEED_IMPORTANCE = frozenset(
    {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs"}
)  # of llama-quantize
# Tries to either side, whether they begin at a fit, which points are chosen again; then step, least maximum, fudge.
_SEARCHES = {
    "iq2_xxs": ((6, True, ALWAYS), (0.1, 1e-15, 1.0)),
    "iq2_xs": ((9, False, OFF_GRID), (0.1, 1e-15, 1.0)),
    "iq2_s": ((9, False, OFF_GRID), (0.1, 1e-8, 0.9875)),
    "iq3_xxs": ((15, False, OFF_GRID), (0.2, 1e-8, 1.0125)),
    "iq3_s": ((9, False, ALL_IF_ANY), (0.2, 1e-45, 1.033)),
}
_TERNARY = {"iq1_s": (1e-12, 1.125), "iq1_m": (1e-7, 1.1125)}
_ONE_MEAN = frozenset({"iq2_xxs", "iq2_xs"})  # of the others the mean square counts twice


def quantize(
    weight: Tensor, scheme: Scheme, importance: Tensor | None, *, every: int = 1
) -> QuantizedTensor:
    """Return what ggml makes of ``weight`` ``[rows, in]`` float32; ``importance`` ``[in]``.

    With ``every`` above 1 only one of as many scales is tried, which is faster and finds others.

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
    codes, parameters = (
        _ternary(x, w, grid, every > 1) if grid in _TERNARY else _magnitudes(x, w, grid, every)
    )
    rows = len(weight)
    shaped = {key: value.reshape(rows, -1).to(weight.device) for key, value in parameters.items()}
    return QuantizedTensor(codes.reshape(rows, -1).to(weight.device), shaped, scheme)


def _weights(x: Array, grid: str, importance: Array | None) -> Array:
    """Return the weights of all values, in the arithmetic of ggml."""
    from quantforge.packers.lattices import weight_loops

    known = numpy.empty((0, 256), numpy.float32) if importance is None else importance
    found, share = numpy.empty_like(x), numpy.float32(0.25 if grid == "iq2_s" else 0)
    weight_loops.weigh(x, numpy.ascontiguousarray(known), grid not in _ONE_MEAN, share, found)
    return found


def _magnitudes(x: Array, w: Array, grid: str, every: int) -> tuple[Tensor, dict[str, Tensor]]:
    from quantforge.packers.lattices import reference_loops

    lattice, block = LATTICES[grid], SUPERBLOCKS[grid]
    (tries, positive, again), (step, *others) = _SEARCHES[grid]
    numbers = (step * every, *others)
    groups, width = 256 // block.group, lattice.width
    places = numpy.empty((len(x), 256 // width), numpy.int32)
    signs, units = numpy.empty((len(x), 32), numpy.uint8), numpy.empty(len(x), numpy.float32)
    scales = numpy.empty((len(x), groups), numpy.float32)
    levels = numpy.empty((len(x), groups), numpy.uint8)
    form = (block.group, (0,) * width, len(lattice.values))
    options = (lattice.signs == "even", tries // every, positive, again)
    reference_loops.search(
        x, w, form, options, tuple(map(numpy.float32, numbers)), tuple(neighbours(grid)),
        2 * digits(grid).astype(numpy.float32) + 1, places, signs, scales, levels, units,
    )  # fmt: skip
    codes = places
    if lattice.vectors == 2:
        codes = places[:, ::2] | places[:, 1::2] << lattice.index_bits
    if lattice.columns == 4:
        signs = numpy.stack([signs & 15, signs >> 4], 2).reshape(len(x), -1)
    codes |= signs.astype(numpy.int32) << lattice.sign_place
    return torch.from_numpy(codes), _parameters(units, levels)


def _ternary(x: Array, w: Array, grid: str, rough: bool) -> tuple[Tensor, dict[str, Tensor]]:
    from quantforge.packers.lattices import ternary_loops

    size, (least, fudge) = SUPERBLOCKS[grid].group, _TERNARY[grid]
    codes, lowered = numpy.empty((len(x), 32), numpy.int32), numpy.empty((len(x), 32), numpy.bool_)
    levels, units = (
        numpy.empty((len(x), 256 // size), numpy.uint8),
        numpy.empty(len(x), numpy.float32),
    )
    ternary_loops.search(
        x, w, size, rough, numpy.float32(least), numpy.float32(fudge), tuple(neighbours(grid)), points(grid),
        codes, lowered, levels, units,
    )  # fmt: skip
    parameters = _parameters(units, levels)
    if grid == "iq1_m":
        codes |= lowered.astype(numpy.int32) << LATTICES[grid].sign_place
    else:
        parameters["shifts"] = torch.from_numpy(lowered[:, ::4].astype(numpy.uint8))
    return torch.from_numpy(codes), parameters


def _parameters(units: Array, levels: NDArray[numpy.uint8]) -> dict[str, Tensor]:
    return {"d": torch.from_numpy(units).half(), "scales": torch.from_numpy(levels)}
