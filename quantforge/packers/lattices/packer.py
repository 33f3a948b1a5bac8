"""The lattice types for rounders: ``fit``, ``encode``, ``decode``, ``nearest_vectors``; ggml's own rows by `encode_rows`.

There are two ways to the codes of a matrix:

- *Ours.* `fit` chooses scales that minimise ``sum w (x - q)^2``; `encode` and `encode_weighted` then take the nearest
points
  under weighted squares, `nearest_vectors` those under the metric of error feedback. The loops are in `nearest_loops`.
- *ggml's.* `encode_rows` has the bytes of ggml's own quantizers (`magnitude_loops`, `ternary_loops`), with two
  exceptions. Both shifts of a half of IQ1_M that holds only zeros lose the same, and ggml may take the other one. And
  where a group of IQ3_S is all zero and others of its block are not, ggml writes the indices of the groups after it
  into the places of the group before: such a block does not hold the weights; here it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from quantforge.errors import InputError
from quantforge.grids import GGML_BLOCKS
from quantforge.packers.ggml.refit import QuadraticError, take_best
from quantforge.packers.hessian_refit import FixedCodes, RefitStep
from quantforge.packers.lattices import LATTICES, NEED_IMPORTANCE
from quantforge.packers.lattices.points import (
    decode_values,
    digit_values,
    lattice_points,
    neighbor_lists,
    point_digits,
    point_halves,
)
from quantforge.packers.tensor import KernelInputs, QuantizedTensor
from quantforge.scheme import Scheme

FloatArray = NDArray[numpy.float32]
SEARCH_ROWS = 256  # that are searched at a time
_TYPES_WITH_SINGLE_MEAN = frozenset(
    {"iq2_xxs", "iq2_xs"}
)  # the mean square of the others counts twice in ggml's weights


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose the parameters of ``weight`` ``[out, in]`` float32; ``in`` is a multiple of 256.

    Without ``search`` they are ggml's.

    Raises:
        InputError: a scale is beyond the range of float16.
    """
    columns = weight.new_ones(weight.shape[1]) if importance is None else importance.to(weight)
    parts = [
        _search_parameters(rows, scheme, columns, brief=not search)
        for rows in torch.split(weight, SEARCH_ROWS)
    ]
    return _checked({key: torch.cat([part[key] for part in parts]) for key in parts[0]})


def encode_rows(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None
) -> QuantizedTensor:
    """Quantize whole rows ``[rows, in]`` float32 to ggml's own codes.

    Raises:
        InputError: a scale is beyond the range of float16, or the type needs an importance.
    """
    if importance is None and scheme.grid in NEED_IMPORTANCE:
        raise InputError(
            f"--scales reference: ggml has no {scheme.grid.upper()} without an importance of the columns",
            "--calibration TEXT, or --imatrix FILE",
        )
    tensor = _quantize_as_ggml(weight, scheme, importance)
    _checked(tensor.parameters)
    return tensor


def _checked(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not bool(parameters["d"].isfinite().all()):
        raise InputError(
            "a scale is beyond 65504, the largest float16, which is all that ggml's blocks hold",
            "keep this tensor with --ignore",
        )
    return dict(parameters)


def decode(
    codes: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the float32 values of ``codes`` ``[out, n]``, the run ``columns`` of the whole matrix."""
    values, (step, shift) = (
        decode_values(codes, scheme.grid),
        _column_steps(parameters, scheme, columns),
    )
    return (values if shift is None else values + shift) * step


def encode(
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the codes of the points nearest to ``weight`` ``[out, n]``, the run ``columns`` of the whole matrix."""
    step, shift = _column_steps(parameters, scheme, columns)
    return nearest_weighted(weight, step, shift, scheme.grid, torch.ones_like(weight))


def encode_weighted(
    weight: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, importance: Tensor
) -> Tensor:
    """Return the codes of ``weight`` ``[out, in]`` with the smallest errors, weighted as in the search of `fit`."""
    step, shift = _column_steps(parameters, scheme, None, 8)
    weights = error_weights(weight, importance.to(weight))
    return nearest_weighted(weight, step, shift, scheme.grid, weights)


def nearest_vectors(
    targets: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice,
    root: Tensor,
) -> Tensor:
    """Return codes ``[out, 1]`` of vectors near ``targets`` ``[out, v]`` by the distance ``|(t - q) root|``.

    All points are tried with a few choices of signs, so that a nearer vector with other signs may be missed.
    """
    step, shift = _column_steps(parameters, scheme, columns)
    shifts = torch.zeros_like(step) if shift is None else shift
    return nearest_in_metric(targets, step[:, 0], shifts[:, 0], scheme.grid, root)


def column_grid(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> None:
    """Return None: a column alone has no points."""


def kernel_inputs(tensor: QuantizedTensor) -> KernelInputs:
    """Refuse: no kernel multiplies these codes, so models hold them decoded."""
    raise NotImplementedError(f"no kernel multiplies {tensor.scheme}")


def _column_steps(
    parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None, each: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Return step and shift of some columns, ``[rows, n / each]``; no shift where codes have it, or there is none."""
    block, raised = GGML_BLOCKS[scheme.grid], LATTICES[scheme.grid].shift
    size, run, mine = block.group // each, slice(None), parameters
    if columns is not None:  # take the parameters of whole blocks around them
        first, last = columns.start // block.columns, -(-columns.stop // block.columns)
        groups = block.columns // block.group
        many = {key: 1 if key == "d" else groups for key in parameters}
        mine = {
            key: value[:, first * many[key] : last * many[key]] for key, value in parameters.items()
        }
        run = slice(columns.start - first * block.columns, columns.stop - first * block.columns)
    step = _group_steps(mine, scheme.grid).repeat_interleave(size, 1)[:, run]
    if "shifts" not in mine:
        return step, None
    shift = torch.where(mine["shifts"].bool(), -raised, raised)
    return step, shift.repeat_interleave(size, 1)[:, run]


def _group_steps(parameters: Mapping[str, Tensor], grid: str) -> Tensor:
    """Return the step of each group, float32 ``[rows, groups]``."""
    unit, scales = parameters["d"].float(), parameters["scales"].float()
    spread = (2 * scales + 1).view(*unit.shape, -1) * LATTICES[grid].unit
    return (unit.unsqueeze(-1) * spread).flatten(1)


# Ours: scales by search, and the nearest points


def _search_parameters(
    weight: Tensor, scheme: Scheme, importance: Tensor, *, brief: bool
) -> dict[str, Tensor]:
    """Return parameters that minimise ``sum w (x - q)^2`` jointly with the codes; with ``brief`` ggml's.

    ggml finds the scale of a group without regard to the integer it is stored as, and keeps the codes of the real one.
    Here its result is the start, from some of its scales. Then each group takes, of its level and those beside it, the
    one with the smallest error once all of its codes are chosen anew for it; the unit of the block is fitted to codes
    and levels; and both are done once more where that pays. A level is given up as soon as the best rounding of each
    weight alone loses too much.
    """
    block, lattice = GGML_BLOCKS[scheme.grid], LATTICES[scheme.grid]
    start = _quantize_as_ggml(
        weight, scheme, importance, every=1 if brief else lattice.every
    ).parameters
    if brief:
        return dict(start)
    from quantforge.packers.lattices import nearest_loops

    assert block.units is not None
    x, w = (
        _to_float_array(part).reshape(-1, block.columns)
        for part in (weight, error_weights(weight, importance))
    )
    units = _to_float_array(start["d"]).reshape(-1).copy()
    levels = start["scales"].cpu().numpy().reshape(len(x), -1).copy()
    shared = "shifts" in start
    lowered = numpy.zeros_like(levels)
    if shared:
        lowered = start["shifts"].cpu().numpy().reshape(levels.shape).copy()
    signs = bool(lattice.signs), lattice.signs == "even", lattice.shifts_codes, shared
    numbers = block.group, block.units[1], numpy.float32(lattice.unit), lattice.rounds
    tables = _code_shifts(scheme.grid), _search_tables(scheme.grid), lattice_points(scheme.grid)
    nearest_loops.search_scales(x, w, (*signs, *numbers), *tables, units, levels, lowered)
    found = {"d": torch.from_numpy(units).half(), "scales": torch.from_numpy(levels)}
    if shared:
        found["shifts"] = torch.from_numpy(lowered)
    return {key: value.view(start[key].shape).to(weight.device) for key, value in found.items()}


def error_weights(weight: Tensor, importance: Tensor) -> Tensor:
    """Return ``importance * sqrt(mean x^2 + x^2)`` of ``weight`` ``[rows, in]``, the mean of 256 columns."""
    weights = _error_weights(
        _to_blocks_of_256(weight), _to_blocks_of_256(importance), twice=False, share=0
    )
    return torch.from_numpy(weights).view(weight.shape).to(weight.device)


def nearest_weighted(
    weight: Tensor, step: Tensor, shift: Tensor | None, grid: str, weighted: Tensor
) -> Tensor:
    """Return codes of ``weight`` ``[rows, n]``, whose errors have the weights ``weighted`` of the same shape.

    Steps have the same shape, too, or one for each 8 columns, and shifts likewise.
    """
    from quantforge.packers.lattices import nearest_loops

    lattice, rows = LATTICES[grid], len(weight)
    parts, spare = [weight, weighted, step], -weight.shape[1] % 8
    if spare:
        parts = [functional.pad(part, (0, spare)) for part in parts]
    x, w, s = (_to_float_array(part) for part in parts)
    s = s.reshape(-1, 8 if s.size == x.size else 1)
    x, w = x.reshape(-1, 8), w.reshape(-1, 8)
    lowered = torch.empty(0, dtype=torch.int64)
    if shift is not None:
        lowered = (shift[:, :: 8 * shift.shape[1] // weight.shape[1]] < 0).flatten().long().cpu()
    many = 8 // lattice.columns
    codes = numpy.empty((len(x), many), numpy.int32)
    signs = bool(lattice.signs), lattice.signs == "even", lattice.shifts_codes
    form = (*signs, lattice.index_bits, many)
    shifts, tables = _code_shifts(grid), _search_tables(grid)
    nearest_loops.nearest_weighted(x, w, s, lowered.numpy(), shifts, form, tables, codes)
    found = torch.from_numpy(codes).view(rows, -1)[:, : weight.shape[1] // lattice.columns]
    return found.to(weight.device)


@cache
def _search_tables(grid: str) -> tuple[Any, ...]:
    """Return a tuple as long as there are digits, their values, and `Halves`."""
    values = digit_values(grid)
    return ((0,) * len(values), values, *point_halves(grid))


@cache
def _code_shifts(grid: str) -> FloatArray:
    """Return the shifts that a code can have, up and down, float32 ``[2, 8]``."""
    raised = LATTICES[grid].shift
    return numpy.repeat(numpy.array([[raised], [-raised]], numpy.float32), 8, 1)


def nearest_in_metric(
    targets: Tensor, step: Tensor, shift: Tensor, grid: str, root: Tensor
) -> Tensor:
    """Return codes ``[rows, 1]`` near ``targets`` ``[rows, v]``, steps and shifts ``[rows]``; see `nearest_vectors`."""
    from quantforge.packers.lattices import nearest_loops

    lattice = LATTICES[grid]
    metric = _to_float_array(root.double() @ root.double().T)
    width = lattice.width
    marginal = metric[:width, :width]
    if lattice.vectors > 1:
        cross, rest = metric[:width, width:], metric[width:, width:]
        marginal = marginal - cross @ numpy.linalg.solve(rest.astype(numpy.float64), cross.T)
    signs = bool(lattice.signs), lattice.signs == "even", lattice.shifts_codes
    form = (width, lattice.vectors, lattice.index_bits, *signs)
    metrics = metric, numpy.ascontiguousarray(marginal, numpy.float32)
    codes = numpy.empty(len(targets), numpy.int32)
    vectors = (_to_float_array(part) for part in (targets, step, shift))
    eighth = numpy.float32(lattice.shift)
    nearest_loops.nearest_in_metric(*vectors, lattice_points(grid), form, eighth, *metrics, codes)
    return torch.from_numpy(codes).unsqueeze(1).to(targets.device)


def refit_steps(scheme: Scheme, in_features: int) -> Sequence[RefitStep]:  # noqa: ARG001
    """Return the steps of fitting again with the codes held: the level of each group, then the unit of each block."""
    block = GGML_BLOCKS[scheme.grid]
    levels = RefitStep(block.group, partial(_refit_level, scheme.grid))
    return (levels, RefitStep(block.columns, partial(_refit_unit, scheme.grid)))


def _refit_level(grid: str, parameters: dict[str, Tensor], held: FixedCodes) -> Tensor:
    block, place = GGML_BLOCKS[grid], held.group
    above = place * block.group // block.columns
    unit = parameters["d"][:, above : above + 1] * (2 * LATTICES[grid].unit)  # of one level
    values = _decode_fixed_codes(grid, parameters, held, slice(place, place + 1))
    plane = QuadraticError.from_directions(values, torch.zeros_like(values), held)
    mine = {"scales": parameters["scales"][:, place : place + 1]}
    assert block.units is not None
    least, most = block.units

    def near() -> Iterator[dict[str, Tensor]]:
        for move in (-1, 1):
            yield {"scales": (mine["scales"] + move).clamp(least, most)}

    def gain(tried: dict[str, Tensor]) -> Tensor:
        change = (tried["scales"] - mine["scales"]) * unit
        return plane.gain(change, torch.zeros_like(change))

    return take_best(mine, near(), gain)


def _refit_unit(grid: str, parameters: dict[str, Tensor], held: FixedCodes) -> Tensor:
    block, place = GGML_BLOCKS[grid], held.group
    count = block.columns // block.group
    groups = slice(place * count, (place + 1) * count)
    levels = (2 * parameters["scales"][:, groups] + 1) * LATTICES[grid].unit
    spread = levels.T.repeat_interleave(block.group, 0)
    up = _decode_fixed_codes(grid, parameters, held, groups) * spread
    plane = QuadraticError.from_directions(up, torch.zeros_like(up), held)
    mine = {"d": parameters["d"][:, place : place + 1]}
    wished, none = plane.minimize(offset=False)
    tried = {"d": (mine["d"] + wished).half().float()}

    def gain(found: dict[str, Tensor]) -> Tensor:
        return plane.gain(found["d"] - mine["d"], none)

    return take_best(mine, [tried], gain)


def _decode_fixed_codes(
    grid: str, parameters: dict[str, Tensor], held: FixedCodes, groups: slice
) -> Tensor:
    """Return the values of the codes in units of the step, shift included, ``[columns, rows]``."""
    values = decode_values(held.codes.T, grid).T
    if "shifts" not in parameters:
        return values
    raised = LATTICES[grid].shift
    shift = torch.where(parameters["shifts"][:, groups] > 0, -raised, raised)
    return values + shift.T.repeat_interleave(GGML_BLOCKS[grid].group, 0)


# ggml's own


def _quantize_as_ggml(
    weight: Tensor, scheme: Scheme, importance: Tensor | None, *, every: int = 1
) -> QuantizedTensor:
    """Return what ggml makes of ``weight`` ``[rows, in]`` float32; ``importance`` ``[in]``.

    With ``every`` above 1 only one in as many scales is tried, which is faster and finds others.
    """
    grid, x = scheme.grid, _to_blocks_of_256(weight)
    known = (
        numpy.empty((0, 256), numpy.float32)
        if importance is None
        else _to_blocks_of_256(importance)
    )
    w = _error_weights(
        x, known, twice=grid not in _TYPES_WITH_SINGLE_MEAN, share=0.25 if grid == "iq2_s" else 0
    )
    if LATTICES[grid].signs:
        codes, units, levels, shifts = _quantize_magnitudes(x, w, grid, every)
    else:
        codes, units, levels, shifts = _quantize_ternary(x, w, grid, every > 1)
    parameters = {"d": torch.from_numpy(units).half(), "scales": torch.from_numpy(levels)}
    parameters |= shifts
    rows = len(weight)
    shaped = {key: value.reshape(rows, -1).to(weight.device) for key, value in parameters.items()}
    return QuantizedTensor(
        torch.from_numpy(codes).reshape(rows, -1).to(weight.device), shaped, scheme
    )


def _error_weights(
    x: FloatArray, importance: FloatArray, *, twice: bool, share: float
) -> FloatArray:
    from quantforge.packers.lattices import magnitude_loops

    found = numpy.empty_like(x)
    magnitude_loops.compute_error_weights(x, importance, twice, numpy.float32(share), found)
    return found


CodesAndParams = tuple[NDArray[numpy.int32], FloatArray, NDArray[numpy.uint8], dict[str, Tensor]]


def _quantize_magnitudes(x: FloatArray, w: FloatArray, grid: str, every: int) -> CodesAndParams:
    """Return codes, units, levels and no shifts of IQ2 and IQ3."""
    from quantforge.packers.lattices import magnitude_loops

    lattice, block = LATTICES[grid], GGML_BLOCKS[grid]
    (tries, positive, again), (step, least, fudge) = magnitude_loops.SEARCHES[grid]
    groups, width = 256 // block.group, lattice.width
    places = numpy.empty((len(x), 256 // width), numpy.int32)
    signs, units = numpy.empty((len(x), 32), numpy.uint8), numpy.empty(len(x), numpy.float32)
    scales = numpy.empty((len(x), groups), numpy.float32)
    levels = numpy.empty((len(x), groups), numpy.uint8)
    form = (block.group, (0,) * width, len(lattice.values))
    options = (lattice.signs == "even", tries // every, positive, again)
    numbers = tuple(map(numpy.float32, (step * every, least, fudge)))
    odd = 2 * point_digits(grid).astype(numpy.float32) + 1
    found = places, signs, scales, levels, units
    magnitude_loops.search(x, w, form, options, numbers, tuple(neighbor_lists(grid)), odd, *found)
    codes = places
    if lattice.vectors == 2:
        codes = places[:, ::2] | places[:, 1::2] << lattice.index_bits
    if lattice.columns == 4:
        signs = numpy.stack([signs & 15, signs >> 4], 2).reshape(len(x), -1)
    codes |= signs.astype(numpy.int32) << lattice.sign_place
    return codes, units, levels, {}


def _quantize_ternary(x: FloatArray, w: FloatArray, grid: str, rough: bool) -> CodesAndParams:
    """Return codes, units, levels and shifts of groups of IQ1."""
    from quantforge.packers.lattices import ternary_loops

    size, limits = GGML_BLOCKS[grid].group, map(numpy.float32, ternary_loops.LIMITS[grid])
    codes, lowered = numpy.empty((len(x), 32), numpy.int32), numpy.empty((len(x), 32), numpy.bool_)
    levels = numpy.empty((len(x), 256 // size), numpy.uint8)
    units = numpy.empty(len(x), numpy.float32)
    tables = (tuple(neighbor_lists(grid)), lattice_points(grid))
    found = (codes, lowered, levels, units)
    ternary_loops.search(x, w, size, rough, *limits, *tables, *found)
    if grid == "iq1_m":
        codes |= lowered.astype(numpy.int32) << LATTICES[grid].sign_place
        return codes, units, levels, {}
    shifts = torch.from_numpy(lowered[:, ::4].astype(numpy.uint8))
    return codes, units, levels, {"shifts": shifts}


def _to_blocks_of_256(part: Tensor) -> FloatArray:
    """Return ``part`` as float32 ``[n, 256]``."""
    return _to_float_array(part).reshape(-1, 256)


def _to_float_array(part: Tensor) -> FloatArray:
    """Return ``part`` as contiguous float32."""
    found: FloatArray = part.detach().cpu().float().contiguous().numpy()
    return found
