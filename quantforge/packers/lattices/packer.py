"""Fit, encode and decode the lattice types: the `VectorPacker` functions, and rows by `encode_rows`.

A matrix can be encoded in two ways:

- *By QuantForge's search.* `fit` chooses scales that minimize ``sum w (x - q)^2``; `encode` and `encode_weighted` take
  the nearest points in weighted squares, `nearest_vectors` those in the metric of GPTQ. The loops are in
  `nearest_loops`.
- *As ggml.* `encode_rows` gives the bytes of ggml's own quantizers (`magnitude_loops`, `ternary_loops`), with two
  exceptions. Both shifts of a half of IQ1_M that holds only zeros have the same error, and ggml may take the other one.
  And if a group of IQ3_S is all zero and others of its block are not, ggml writes the indices of the groups after it
  to the place of the group before it, so that its block does not represent the weights; here it does.
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
SEARCH_ROWS = 256  # rows that are searched at a time
# In ggml's error weights of the other types the mean square counts twice.
_TYPES_WITH_SINGLE_MEAN = frozenset({"iq2_xxs", "iq2_xs"})


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose the parameters of ``weight`` ``[out, in]`` float32; ``in`` is a multiple of 256.

    Without ``search`` they are the same as ggml's.

    Raises:
        InputError: a scale is beyond the range of float16.
    """
    column_weights = (
        weight.new_ones(weight.shape[1]) if importance is None else importance.to(weight)
    )
    chunks = [
        _search_parameters(rows, scheme, column_weights, brief=not search)
        for rows in torch.split(weight, SEARCH_ROWS)
    ]
    return _checked({key: torch.cat([chunk[key] for chunk in chunks]) for key in chunks[0]})


def encode_rows(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None
) -> QuantizedTensor:
    """Quantize whole rows ``[rows, in]`` float32 as ggml does.

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
    """Return the float32 values of ``codes`` ``[out, n]``, which are the given columns of the whole matrix."""
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
    """Return the codes of the points nearest to ``weight`` ``[out, n]``, the given columns of the whole matrix."""
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
    """Return the codes ``[out, 1]`` of vectors near ``targets`` ``[out, v]`` in the distance ``|(t - q) root|``.

    All points are tried with a few choices of signs, so that a nearer vector with other signs may be missed.
    """
    step, shift = _column_steps(parameters, scheme, columns)
    shifts = torch.zeros_like(step) if shift is None else shift
    return nearest_in_metric(targets, step[:, 0], shifts[:, 0], scheme.grid, root)


def column_grid(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> None:
    """Return None: a single column has no code of its own."""


def kernel_inputs(tensor: QuantizedTensor) -> KernelInputs:
    """Raise NotImplementedError: no kernel multiplies these codes, so models hold such weights decoded."""
    raise NotImplementedError(f"no kernel multiplies {tensor.scheme}")


def _column_steps(
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None,
    columns_per_step: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Return step and shift of the given columns, ``[rows, n / columns_per_step]``.

    The shift is None if the type has none or if codes hold it.
    """
    block, shift_size = GGML_BLOCKS[scheme.grid], LATTICES[scheme.grid].shift_size
    repeats, inner_columns, selected = block.group_size // columns_per_step, slice(None), parameters
    if columns is not None:  # take the parameters of whole blocks around them
        first_block, last_block = columns.start // block.columns, -(-columns.stop // block.columns)
        groups = block.columns // block.group_size
        values_per_block = {key: 1 if key == "d" else groups for key in parameters}
        selected = {
            key: value[:, first_block * values_per_block[key] : last_block * values_per_block[key]]
            for key, value in parameters.items()
        }
        inner_columns = slice(
            columns.start - first_block * block.columns, columns.stop - first_block * block.columns
        )
    step = _group_steps(selected, scheme.grid).repeat_interleave(repeats, 1)[:, inner_columns]
    if "shifts" not in selected:
        return step, None
    shift = torch.where(selected["shifts"].bool(), -shift_size, shift_size)
    return step, shift.repeat_interleave(repeats, 1)[:, inner_columns]


def _group_steps(parameters: Mapping[str, Tensor], grid: str) -> Tensor:
    """Return the step of each group, float32 ``[rows, groups]``."""
    unit, scales = parameters["d"].float(), parameters["scales"].float()
    odd_levels = (2 * scales + 1).view(*unit.shape, -1) * LATTICES[grid].step_factor
    return (unit.unsqueeze(-1) * odd_levels).flatten(1)


# QuantForge's search for scales, and nearest points


def _search_parameters(
    weight: Tensor, scheme: Scheme, importance: Tensor, *, brief: bool
) -> dict[str, Tensor]:
    """Return parameters that minimize ``sum w (x - q)^2`` jointly with the codes; with ``brief`` those of ggml.

    ggml chooses the scale of a group as a real number, keeps the codes for it, and then rounds the scale to an integer
    level. Here ggml's result, from some of its candidate scales, is the start. Then each group tries its level and the
    neighboring ones, each with all codes chosen again, and takes the one with the smallest error; the unit of the block
    is fitted to codes and levels; and both are repeated for the types where that helps. A level is given up as soon as
    the error of the unconstrained best digits is too large.
    """
    block, lattice = GGML_BLOCKS[scheme.grid], LATTICES[scheme.grid]
    start = _quantize_as_ggml(
        weight, scheme, importance, scale_stride=1 if brief else lattice.scale_stride
    ).parameters
    if brief:
        return dict(start)
    from quantforge.packers.lattices import nearest_loops

    assert block.units is not None
    x, w = (
        _to_float_array(array).reshape(-1, block.columns)
        for array in (weight, error_weights(weight, importance))
    )
    units = _to_float_array(start["d"]).reshape(-1).copy()
    levels = start["scales"].cpu().numpy().reshape(len(x), -1).copy()
    has_group_shifts = "shifts" in start
    is_lowered = numpy.zeros_like(levels)
    if has_group_shifts:
        is_lowered = start["shifts"].cpu().numpy().reshape(levels.shape).copy()
    options = bool(lattice.signs), lattice.signs == "even", lattice.shift_per_code, has_group_shifts
    search_numbers = (
        block.group_size,
        block.units[1],
        numpy.float32(lattice.step_factor),
        lattice.search_rounds,
    )
    tables = _code_shifts(scheme.grid), _search_tables(scheme.grid), lattice_points(scheme.grid)
    nearest_loops.search_scales(
        x, w, (*options, *search_numbers), *tables, units, levels, is_lowered
    )
    parameters = {"d": torch.from_numpy(units).half(), "scales": torch.from_numpy(levels)}
    if has_group_shifts:
        parameters["shifts"] = torch.from_numpy(is_lowered)
    return {
        key: value.view(start[key].shape).to(weight.device) for key, value in parameters.items()
    }


def error_weights(weight: Tensor, importance: Tensor) -> Tensor:
    """Return ``importance * sqrt(mean x^2 + x^2)`` for ``weight`` ``[rows, in]``, with the mean over 256 columns."""
    weights = _error_weights(
        _to_blocks_of_256(weight), _to_blocks_of_256(importance), double_mean=False, mean_share=0
    )
    return torch.from_numpy(weights).view(weight.shape).to(weight.device)


def nearest_weighted(
    weight: Tensor, step: Tensor, shift: Tensor | None, grid: str, error_weights: Tensor
) -> Tensor:
    """Return the codes of ``weight`` ``[rows, n]`` with the least squared error under ``error_weights`` ``[rows, n]``.

    Steps have the same shape or one entry for each 8 columns, and so have shifts.
    """
    from quantforge.packers.lattices import nearest_loops

    lattice, rows = LATTICES[grid], len(weight)
    arrays, padding = [weight, error_weights, step], -weight.shape[1] % 8
    if padding:
        arrays = [functional.pad(array, (0, padding)) for array in arrays]
    x, w, steps = (_to_float_array(array) for array in arrays)
    steps = steps.reshape(-1, 8 if steps.size == x.size else 1)
    x, w = x.reshape(-1, 8), w.reshape(-1, 8)
    shift_index = torch.empty(0, dtype=torch.int64)
    if shift is not None:
        shift_index = (
            (shift[:, :: 8 * shift.shape[1] // weight.shape[1]] < 0).flatten().long().cpu()
        )
    codes_per_vector = 8 // lattice.weights_per_code
    codes = numpy.empty((len(x), codes_per_vector), numpy.int32)
    signs = bool(lattice.signs), lattice.signs == "even", lattice.shift_per_code
    layout = (*signs, lattice.index_bits, codes_per_vector)
    shifts, tables = _code_shifts(grid), _search_tables(grid)
    nearest_loops.nearest_weighted(x, w, steps, shift_index.numpy(), shifts, layout, tables, codes)
    vector_codes = torch.from_numpy(codes).view(rows, -1)[
        :, : weight.shape[1] // lattice.weights_per_code
    ]
    return vector_codes.to(weight.device)


@cache
def _search_tables(grid: str) -> tuple[Any, ...]:
    """Return the ``tables`` of `nearest_loops`: a tuple with an entry per digit, the digits' values, `PointHalves`."""
    values = digit_values(grid)
    return ((0,) * len(values), values, *point_halves(grid))


@cache
def _code_shifts(grid: str) -> FloatArray:
    """Return the two shifts that a code can have, positive and negative, float32 ``[2, 8]``."""
    shift_size = LATTICES[grid].shift_size
    return numpy.repeat(numpy.array([[shift_size], [-shift_size]], numpy.float32), 8, 1)


def nearest_in_metric(
    targets: Tensor, step: Tensor, shift: Tensor, grid: str, root: Tensor
) -> Tensor:
    """Return codes ``[rows, 1]`` near ``targets`` ``[rows, v]``, steps and shifts ``[rows]``; see `nearest_vectors`."""
    from quantforge.packers.lattices import nearest_loops

    lattice = LATTICES[grid]
    metric = _to_float_array(root.double() @ root.double().T)
    width = lattice.width
    marginal = metric[:width, :width]
    if lattice.points_per_code > 1:
        cross_block, second_block = metric[:width, width:], metric[width:, width:]
        marginal = marginal - cross_block @ numpy.linalg.solve(
            second_block.astype(numpy.float64), cross_block.T
        )
    signs = bool(lattice.signs), lattice.signs == "even", lattice.shift_per_code
    layout = (width, lattice.points_per_code, lattice.index_bits, *signs)
    metrics = metric, numpy.ascontiguousarray(marginal, numpy.float32)
    codes = numpy.empty(len(targets), numpy.int32)
    vectors = (_to_float_array(array) for array in (targets, step, shift))
    shift_size = numpy.float32(lattice.shift_size)
    nearest_loops.nearest_in_metric(
        *vectors, lattice_points(grid), layout, shift_size, *metrics, codes
    )
    return torch.from_numpy(codes).unsqueeze(1).to(targets.device)


def refit_steps(scheme: Scheme, in_features: int) -> Sequence[RefitStep]:  # noqa: ARG001
    """Return the refinement steps: the integer scale of each group, then the unit of each block."""
    block = GGML_BLOCKS[scheme.grid]
    level_step = RefitStep(block.group_size, partial(_refit_level, scheme.grid))
    return (level_step, RefitStep(block.columns, partial(_refit_unit, scheme.grid)))


def _refit_level(grid: str, parameters: dict[str, Tensor], fixed: FixedCodes) -> Tensor:
    block, group_index = GGML_BLOCKS[grid], fixed.group
    block_index = group_index * block.group_size // block.columns
    level_step = parameters["d"][:, block_index : block_index + 1] * (
        2 * LATTICES[grid].step_factor
    )  # of one level
    values = _decode_fixed_codes(grid, parameters, fixed, slice(group_index, group_index + 1))
    error = QuadraticError.from_directions(values, torch.zeros_like(values), fixed)
    group_params = {"scales": parameters["scales"][:, group_index : group_index + 1]}
    assert block.units is not None
    min_level, max_level = block.units

    def candidates() -> Iterator[dict[str, Tensor]]:
        for move in (-1, 1):
            yield {"scales": (group_params["scales"] + move).clamp(min_level, max_level)}

    def gain(candidate: dict[str, Tensor]) -> Tensor:
        change = (candidate["scales"] - group_params["scales"]) * level_step
        return error.gain(change, torch.zeros_like(change))

    return take_best(group_params, candidates(), gain)


def _refit_unit(grid: str, parameters: dict[str, Tensor], fixed: FixedCodes) -> Tensor:
    block, block_index = GGML_BLOCKS[grid], fixed.group
    num_groups = block.columns // block.group_size
    groups = slice(block_index * num_groups, (block_index + 1) * num_groups)
    levels = (2 * parameters["scales"][:, groups] + 1) * LATTICES[grid].step_factor
    column_levels = levels.T.repeat_interleave(block.group_size, 0)
    direction = _decode_fixed_codes(grid, parameters, fixed, groups) * column_levels
    error = QuadraticError.from_directions(direction, torch.zeros_like(direction), fixed)
    block_params = {"d": parameters["d"][:, block_index : block_index + 1]}
    unit_change, no_change = error.minimize(offset=False)
    candidate = {"d": (block_params["d"] + unit_change).half().float()}

    def gain(params: dict[str, Tensor]) -> Tensor:
        return error.gain(params["d"] - block_params["d"], no_change)

    return take_best(block_params, [candidate], gain)


def _decode_fixed_codes(
    grid: str, parameters: dict[str, Tensor], fixed: FixedCodes, groups: slice
) -> Tensor:
    """Return the values of the codes in units of the step, shift included, ``[columns, rows]``."""
    values = decode_values(fixed.codes.T, grid).T
    if "shifts" not in parameters:
        return values
    shift_size = LATTICES[grid].shift_size
    shift = torch.where(parameters["shifts"][:, groups] > 0, -shift_size, shift_size)
    return values + shift.T.repeat_interleave(GGML_BLOCKS[grid].group_size, 0)


# ggml's own quantizers


def _quantize_as_ggml(
    weight: Tensor, scheme: Scheme, importance: Tensor | None, *, scale_stride: int = 1
) -> QuantizedTensor:
    """Quantize ``weight`` ``[rows, in]`` float32 as ggml does; ``importance`` is ``[in]``.

    With ``scale_stride`` above 1 only one in that many scales is tried, which is faster and gives different results.
    """
    grid, x = scheme.grid, _to_blocks_of_256(weight)
    importance_blocks = (
        numpy.empty((0, 256), numpy.float32)
        if importance is None
        else _to_blocks_of_256(importance)
    )
    w = _error_weights(
        x,
        importance_blocks,
        double_mean=grid not in _TYPES_WITH_SINGLE_MEAN,
        mean_share=0.25 if grid == "iq2_s" else 0,
    )
    if LATTICES[grid].signs:
        codes, units, levels, shifts = _quantize_magnitudes(x, w, grid, scale_stride)
    else:
        codes, units, levels, shifts = _quantize_ternary(x, w, grid, scale_stride > 1)
    parameters = {"d": torch.from_numpy(units).half(), "scales": torch.from_numpy(levels)}
    parameters |= shifts
    rows = len(weight)
    shaped = {key: value.reshape(rows, -1).to(weight.device) for key, value in parameters.items()}
    return QuantizedTensor(
        torch.from_numpy(codes).reshape(rows, -1).to(weight.device), shaped, scheme
    )


def _error_weights(
    x: FloatArray, importance: FloatArray, *, double_mean: bool, mean_share: float
) -> FloatArray:
    from quantforge.packers.lattices import magnitude_loops

    weights = numpy.empty_like(x)
    magnitude_loops.compute_error_weights(
        x, importance, double_mean, numpy.float32(mean_share), weights
    )
    return weights


CodesAndParams = tuple[NDArray[numpy.int32], FloatArray, NDArray[numpy.uint8], dict[str, Tensor]]


def _quantize_magnitudes(
    x: FloatArray, w: FloatArray, grid: str, scale_stride: int
) -> CodesAndParams:
    """Quantize blocks to IQ2 or IQ3; return codes, units, levels and an empty dictionary of shifts."""
    from quantforge.packers.lattices import magnitude_loops

    lattice, block = LATTICES[grid], GGML_BLOCKS[grid]
    (tries, fit_positive, snap_mode), (step, min_max, unit_factor) = magnitude_loops.SEARCH_OPTIONS[
        grid
    ]
    groups, width = 256 // block.group_size, lattice.width
    point_indices = numpy.empty((len(x), 256 // width), numpy.int32)
    signs, units = numpy.empty((len(x), 32), numpy.uint8), numpy.empty(len(x), numpy.float32)
    scales = numpy.empty((len(x), groups), numpy.float32)
    levels = numpy.empty((len(x), groups), numpy.uint8)
    layout = (block.group_size, (0,) * width, len(lattice.magnitudes))
    search_options = (lattice.signs == "even", tries // scale_stride, fit_positive, snap_mode)
    search_numbers = tuple(map(numpy.float32, (step * scale_stride, min_max, unit_factor)))
    odd_points = 2 * point_digits(grid).astype(numpy.float32) + 1
    outputs = point_indices, signs, scales, levels, units
    magnitude_loops.search_magnitudes(
        x,
        w,
        layout,
        search_options,
        search_numbers,
        tuple(neighbor_lists(grid)),
        odd_points,
        *outputs,
    )
    codes = point_indices
    if lattice.points_per_code == 2:
        codes = point_indices[:, ::2] | point_indices[:, 1::2] << lattice.index_bits
    if lattice.weights_per_code == 4:
        signs = numpy.stack([signs & 15, signs >> 4], 2).reshape(len(x), -1)
    codes |= signs.astype(numpy.int32) << lattice.sign_shift
    return codes, units, levels, {}


def _quantize_ternary(x: FloatArray, w: FloatArray, grid: str, skip_refit: bool) -> CodesAndParams:
    """Quantize blocks to IQ1; return codes, units, levels and, for iq1_s, the shifts of groups."""
    from quantforge.packers.lattices import ternary_loops

    size, limits = (
        GGML_BLOCKS[grid].group_size,
        map(numpy.float32, ternary_loops.GROUP_LIMITS[grid]),
    )
    codes = numpy.empty((len(x), 32), numpy.int32)
    is_lowered = numpy.empty((len(x), 32), numpy.bool_)
    levels = numpy.empty((len(x), 256 // size), numpy.uint8)
    units = numpy.empty(len(x), numpy.float32)
    tables = (tuple(neighbor_lists(grid)), lattice_points(grid))
    outputs = (codes, is_lowered, levels, units)
    ternary_loops.search_ternary(x, w, size, skip_refit, *limits, *tables, *outputs)
    if grid == "iq1_m":
        codes |= is_lowered.astype(numpy.int32) << LATTICES[grid].sign_shift
        return codes, units, levels, {}
    shifts = torch.from_numpy(is_lowered[:, ::4].astype(numpy.uint8))
    return codes, units, levels, {"shifts": shifts}


def _to_blocks_of_256(tensor: Tensor) -> FloatArray:
    """Convert to a float32 array ``[n, 256]``."""
    return _to_float_array(tensor).reshape(-1, 256)


def _to_float_array(tensor: Tensor) -> FloatArray:
    """Convert to a contiguous float32 array."""
    array: FloatArray = tensor.detach().cpu().float().contiguous().numpy()
    return array
