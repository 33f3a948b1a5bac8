"""The last step of GPTQ: use what `rtn` writes with the same recipe, wherever that has the smaller error.

GPTQ chooses its scales for errors that later columns compensate. Where a few columns dwarf the others, the scales that
`rtn` finds can serve a row better than all that GPTQ makes of its own. So both results are computed from the same
weights and the same importance, and the better one is kept, codes and parameters together. `rtn` is better where its
error is smaller under the Hessian or under the Hessian with its ridge: what stays of GPTQ is worse under neither.

A row is compared and exchanged on its own if everything that it shares with other rows is the same in both results, as
nvfp4's divisor mostly is. Otherwise rows go together, by the sum of their errors: the rows of one row of tiles, the
whole matrix, or all matrices under one scale. Terms of an error only add up, so that the first columns decide nearly
every row (`Factor.below`). Where float32 could be wrong, both errors are computed again in float64: under a Hessian
without full rank they cancel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.grids import Tile
from quantforge.numerics import COMPILED_FROM
from quantforge.numerics.threads import side_by_side
from quantforge.packers import packer_of
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers import rtn
from quantforge.quantizers.gptq.hessian import Factor
from quantforge.quantizers.matrices import stacked
from quantforge.scheme import Scheme

if TYPE_CHECKING:
    from quantforge.quantizers.gptq.gptq import Solution

COMPARED = 512  # rows whose error is compared at a time
MARGIN = 1e-3  # relative: more than the rounding error of float32 in an error


def fall_back_to_rtn(
    matrices: Mapping[str, Tensor],
    found: Solution,
    factor: Factor,
    scheme: Scheme,
    importance: Tensor | None,
    scales: str,
    workers: int,
) -> None:
    """Replace rows of ``found`` by what `rtn` writes, where that has the smaller error (step 6).

    Args:
        matrices: float32, by name, of one scheme; their rows in this order are those of ``found``.
        found: changed in place; replaced rows are marked as rounded to nearest.
        factor: of the Hessian.
        scheme: as stored.
        importance: ``[in]``, of the columns for `rtn`.
        scales: how `rtn` chooses them, as of a `Rounding`.
        workers: threads.
    """
    if scheme.whole:
        schemes = dict.fromkeys(matrices, scheme)
        rtn_result = [*rtn.quantized(matrices, importance, schemes, scales).values()]
        _compare(stacked([*matrices.values()]), found, factor, _together(rtn_result))
        return

    def compare(part: tuple[str, slice, int]) -> None:
        name, rows, offset = part
        weight = matrices[name][rows]
        rtn_result = rtn.quantized({name: weight}, importance, {name: scheme}, scales)[name]
        _compare(weight, found.of_rows(slice(offset, offset + len(weight))), factor, rtn_result)

    side_by_side(compare, [*_strips(matrices)], workers)


def _strips(matrices: Mapping[str, Tensor]) -> Iterator[tuple[str, slice, int]]:
    """Yield strips of rows that `rtn` rounds as it rounds the whole matrix: name, rows, index of the first row in all.

    Only matrices of `COMPILED_FROM` weights or more use compiled loops, which can break a near tie the other way. So no
    strip of such a matrix is smaller.
    """
    offset = 0
    for name, matrix in matrices.items():
        step = -(-COMPILED_FROM // matrix.shape[1])
        starts = [*range(0, max(1, len(matrix) - step + 1), step)]
        for start, stop in zip(starts, [*starts[1:], len(matrix)], strict=True):
            yield name, slice(start, stop), offset + start
        offset += len(matrix)


def _together(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Return the rows of all ``tensors`` as one tensor; parameters that are one object stay as they are."""
    first, last = tensors[0].parameters, tensors[-1].parameters
    parameters = {
        key: value
        if value is last[key]
        else torch.cat([tensor.parameters[key] for tensor in tensors])
        for key, value in first.items()
    }
    codes = stacked([tensor.codes for tensor in tensors])
    return QuantizedTensor(codes, parameters, tensors[0].scheme)


def _compare(weight: Tensor, found: Solution, factor: Factor, rtn_result: QuantizedTensor) -> None:
    """Replace rows of ``found`` one by one, or those together that share parameters which differ in both results."""
    scheme, parameters = rtn_result.scheme, rtn_result.parameters
    values = rtn_result.decode()
    tile = scheme.granularity if isinstance(scheme.granularity, Tile) else None
    shared = {key: value for key, value in parameters.items() if len(value) != len(weight)}
    if not tile and all(torch.equal(found.parameters[key], shared[key]) for key in shared):
        for start in range(0, len(weight), COMPARED):
            strip = slice(start, start + COMPARED)
            rows = start + _maybe_better(weight[strip] - values[strip], found.errors[strip], factor)
            if len(rows):
                exact = _exactly(weight, values, found, scheme, factor, rows)
                better = (exact[0] < exact[1]).any(0)
                keys = parameters.keys() - shared.keys()
                _exchange(found, rtn_result, rows[better], exact[0, 1, better], keys)
        return
    height = tile.rows if tile else len(weight)
    every = torch.arange(len(weight), device=weight.device)
    for band, start in enumerate(range(0, len(weight), height)):
        rows = every[start : start + height]
        error = weight[rows] - values[rows]
        if not factor.all_below(error, fsum(_limits(error, found.errors[rows], factor).tolist())):
            continue
        exact = _exactly(weight, values, found, scheme, factor, rows)
        of_rtn, of_gptq = ([fsum(each.tolist()) for each in ways] for ways in exact)
        if any(one < two for one, two in zip(of_rtn, of_gptq, strict=True)):
            _exchange(found, rtn_result, rows, exact[0, 1], [])
            place = slice(band, band + 1) if tile else slice(None)
            for key, value in parameters.items():
                found.parameters[key][place] = value[place]


def _exchange(
    found: Solution, rtn_result: QuantizedTensor, rows: Tensor, errors: Tensor, keys: Iterable[str]
) -> None:
    found.codes[rows], found.errors[rows] = rtn_result.codes[rows], errors
    found.nearest[rows] = True
    for key in keys:
        found.parameters[key][rows] = rtn_result.parameters[key][rows]


def _maybe_better(error: Tensor, errors: Tensor, factor: Factor) -> Tensor:
    """Return rows whose ``error`` ``[out, in]`` of rounding to nearest may beat the objective ``errors`` ``[out]``."""
    return factor.below(error, _limits(error, errors, factor))[0]


def _limits(error: Tensor, errors: Tensor, factor: Factor) -> Tensor:
    """Return the limit of the objective above which rounding to nearest is no better, without the ridge or with it."""
    return (errors.clamp(min=0) + factor.objective.of_ridge(error)) * (1 + MARGIN)


def _exactly(
    weight: Tensor, values: Tensor, found: Solution, scheme: Scheme, factor: Factor, rows: Tensor
) -> Tensor:
    """Return errors of rows, ``[2, 2, rows]``: rounded to nearest and as found, each without and with the ridge."""
    packer = packer_of(scheme)
    if scheme.whole:
        mine = packer.decode(found.codes, found.parameters, scheme)[rows]
    else:
        chosen = {key: value[rows] for key, value in found.parameters.items()}
        mine = packer.decode(found.codes[rows], chosen, scheme)
    wide = weight[rows].double()
    both = (wide - each.double() for each in (values[rows], mine))
    return torch.stack([factor.objective.exactly(error) for error in both])
