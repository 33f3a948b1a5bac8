"""Last step of GPTQ: replace each row for which `rtn` with the same recipe has the smaller error.

GPTQ chooses scales for errors that later columns compensate. If a few columns are much larger than the others, the
scales that `rtn` finds can serve a row better than any that GPTQ finds. So both results are computed from the same
weights and importance, and the better one is kept, codes and parameters together. `rtn` is better if its error is
smaller under the Hessian or under the Hessian with its ridge: remaining rows of GPTQ are worse under neither.

A row is compared and replaced on its own if everything that it shares with other rows is equal in both results, as
nvfp4's divisor mostly is. Otherwise rows are compared together, by the sum of their errors: the rows of one row of
tiles, the whole matrix, or all matrices under one scale. Terms of an error are positive, so the first columns decide
nearly every row (`Factor.rows_below`). If float32 could be wrong, both errors are computed again in float64: under a
rank-deficient Hessian they cancel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum

import torch
from torch import Tensor

from quantforge.grids import Tile
from quantforge.numerics import COMPILED_FROM
from quantforge.numerics.threads import run_parallel
from quantforge.packers import get_packer
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers import rtn
from quantforge.quantizers.gptq.hessian import Factor
from quantforge.quantizers.gptq.solution import Solution
from quantforge.quantizers.matrices import stack_rows
from quantforge.scheme import Scheme

COMPARED_ROWS = 512  # rows compared at a time
FLOAT32_MARGIN = 1e-3  # relative; exceeds the rounding error of a float32 objective


def fall_back_to_rtn(
    matrices: Mapping[str, Tensor],
    solution: Solution,
    factor: Factor,
    scheme: Scheme,
    importance: Tensor | None,
    scales: str,
    workers: int,
) -> None:
    """Replace rows of ``solution`` by the result of `rtn` if it has the smaller error (step 6).

    Args:
        matrices: float32 matrices of one scheme, by name; their rows in this order are those of ``solution``.
        solution: changed in place; replaced rows are marked as rounded to nearest.
        factor: factor of the Hessian.
        scheme: scheme as stored.
        importance: importance of the columns for `rtn`, ``[in]``.
        scales: how `rtn` chooses scales, see `Rounding`.
        workers: number of threads.
    """
    if scheme.rows_share_parameters:
        schemes = dict.fromkeys(matrices, scheme)
        rtn_result = [*rtn.quantize_matrices(matrices, importance, schemes, scales).values()]
        _replace_if_better(
            stack_rows([*matrices.values()]), solution, factor, _concatenate(rtn_result)
        )
        return

    def compare(row_part: tuple[str, slice, int]) -> None:
        name, rows, offset = row_part
        weight = matrices[name][rows]
        rtn_result = rtn.quantize_matrices({name: weight}, importance, {name: scheme}, scales)[name]
        _replace_if_better(
            weight, solution.row_slice(slice(offset, offset + len(weight))), factor, rtn_result
        )

    run_parallel(compare, [*_row_strips(matrices)], workers)


def _row_strips(matrices: Mapping[str, Tensor]) -> Iterator[tuple[str, slice, int]]:
    """Yield strips of rows that `rtn` rounds as it rounds the whole matrix: name, rows, overall index of the first row.

    Only matrices of at least `COMPILED_FROM` weights use compiled loops, which may break a near tie differently. So no
    strip of such a matrix is smaller.
    """
    offset = 0
    for name, matrix in matrices.items():
        step = -(-COMPILED_FROM // matrix.shape[1])
        starts = [*range(0, max(1, len(matrix) - step + 1), step)]
        for start, stop in zip(starts, [*starts[1:], len(matrix)], strict=True):
            yield name, slice(start, stop), offset + start
        offset += len(matrix)


def _concatenate(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Return the rows of all ``tensors`` as one tensor; parameters that are the same object are not repeated."""
    first, last = tensors[0].parameters, tensors[-1].parameters
    parameters = {
        key: value
        if value is last[key]
        else torch.cat([tensor.parameters[key] for tensor in tensors])
        for key, value in first.items()
    }
    codes = stack_rows([tensor.codes for tensor in tensors])
    return QuantizedTensor(codes, parameters, tensors[0].scheme)


def _replace_if_better(
    weight: Tensor, solution: Solution, factor: Factor, rtn_result: QuantizedTensor
) -> None:
    """Replace rows of ``solution`` one by one, or together if they share parameters that differ between results."""
    scheme, parameters = rtn_result.scheme, rtn_result.parameters
    values = rtn_result.decode()
    tile = scheme.granularity if isinstance(scheme.granularity, Tile) else None
    shared = {key: value for key, value in parameters.items() if len(value) != len(weight)}
    if not tile and all(torch.equal(solution.parameters[key], shared[key]) for key in shared):
        for start in range(0, len(weight), COMPARED_ROWS):
            strip = slice(start, start + COMPARED_ROWS)
            rows = start + _candidate_rows(
                weight[strip] - values[strip], solution.errors[strip], factor
            )
            if len(rows):
                exact = _float64_errors(weight, values, solution, scheme, factor, rows)
                is_better = (exact[0] < exact[1]).any(0)
                keys = parameters.keys() - shared.keys()
                _replace_rows(solution, rtn_result, rows[is_better], exact[0, 1, is_better], keys)
        return
    height = tile.rows if tile else len(weight)
    all_rows = torch.arange(len(weight), device=weight.device)
    for tile_row, start in enumerate(range(0, len(weight), height)):
        rows = all_rows[start : start + height]
        error = weight[rows] - values[rows]
        if not factor.is_total_below(
            error, fsum(_objective_limits(error, solution.errors[rows], factor).tolist())
        ):
            continue
        exact = _float64_errors(weight, values, solution, scheme, factor, rows)
        of_rtn, of_gptq = (
            [fsum(errors.tolist()) for errors in errors_by_method] for errors_by_method in exact
        )
        if any(
            rtn_error < gptq_error for rtn_error, gptq_error in zip(of_rtn, of_gptq, strict=True)
        ):
            _replace_rows(solution, rtn_result, rows, exact[0, 1], [])
            row_slice = slice(tile_row, tile_row + 1) if tile else slice(None)
            for key, value in parameters.items():
                solution.parameters[key][row_slice] = value[row_slice]


def _replace_rows(
    solution: Solution,
    rtn_result: QuantizedTensor,
    rows: Tensor,
    errors: Tensor,
    keys: Iterable[str],
) -> None:
    solution.codes[rows], solution.errors[rows] = rtn_result.codes[rows], errors
    solution.nearest[rows] = True
    for key in keys:
        solution.parameters[key][rows] = rtn_result.parameters[key][rows]


def _candidate_rows(error: Tensor, errors: Tensor, factor: Factor) -> Tensor:
    """Return rows whose ``error`` ``[out, in]`` of rounding to nearest may beat the objective ``errors`` ``[out]``."""
    return factor.rows_below(error, _objective_limits(error, errors, factor))[0]


def _objective_limits(error: Tensor, errors: Tensor, factor: Factor) -> Tensor:
    """Return the objective above which rounding to nearest is not better, with or without the ridge."""
    return (errors.clamp(min=0) + factor.objective.ridge_part(error)) * (1 + FLOAT32_MARGIN)


def _float64_errors(
    weight: Tensor, values: Tensor, solution: Solution, scheme: Scheme, factor: Factor, rows: Tensor
) -> Tensor:
    """Return errors of rows, ``[2, 2, rows]``: rounded to nearest and as found, each without and with the ridge."""
    packer = get_packer(scheme)
    if scheme.rows_share_parameters:
        decoded = packer.decode(solution.codes, solution.parameters, scheme)[rows]
    else:
        row_parameters = {key: value[rows] for key, value in solution.parameters.items()}
        decoded = packer.decode(solution.codes[rows], row_parameters, scheme)
    float64_weight = weight[rows].double()
    differences = (
        float64_weight - approximation.double() for approximation in (values[rows], decoded)
    )
    return torch.stack([factor.objective.evaluate_float64(error) for error in differences])
