"""Plain rows: no row ends worse than what `rtn` writes for it with the same recipe.

GPTQ chooses its scales for errors that later columns make up for. Where a few columns dwarf the others, the scales that
plain rounding finds on its own can serve a row better than all that error feedback and refinement make of GPTQ's. So
that result is made as well, from the same weights and the same importance, and the better one is kept, codes and
parameters together. Plain rounding is better where its error is smaller under the Hessian or under the Hessian with
its ridge: what stays of GPTQ is worse under neither.

A row is compared and exchanged on its own wherever all that it shares with others is the same in both results, as
nvfp4's divisor mostly is. Else rows go together, by the sum of their errors: the rows of one row of tiles, or the whole
matrix, or all matrices under one scale.

The terms of an error only add up, so that nearly every row is decided by its first columns (`Factor.below`). Where
float32 could be mistaken, both errors are computed again in float64: under a Hessian without full rank they cancel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum

import torch
from torch import Tensor

from quantforge.grids import Tile
from quantforge.numerics.threads import side_by_side
from quantforge.packers import packer_of
from quantforge.packers.row_codes import LEAST
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers import rtn
from quantforge.quantizers.feedback import Solution, stacked
from quantforge.quantizers.hessian import Factor
from quantforge.scheme import Scheme

MARGIN = 1e-3  # of an error: more than float32 loses of it
ROWS = 512  # compared at a time


def keep_better(
    matrices: Mapping[str, Tensor],
    found: Solution,
    factor: Factor,
    scheme: Scheme,
    importance: Tensor | None,
    scales: str,
    workers: int,
) -> None:
    """Put what `rtn` writes into ``found`` where it is better.

    Args:
        matrices: float32, by name, of one scheme; their rows in this order are those of ``found``.
        found: changed in place; the rows that were exchanged count as plain.
        factor: of the Hessian.
        scheme: as stored.
        importance: ``[in]``, what plain rounding would weigh the columns with.
        scales: how plain rounding would choose them, as of a `Rounding`.
        workers: runs of rows that are worked off side by side.
    """
    if scheme.whole:
        schemes = dict.fromkeys(matrices, scheme)
        plain = [*rtn.quantized(matrices, importance, schemes, scales).values()]
        _compare(stacked([*matrices.values()]), found, factor, _together(plain))
        return

    def compare(part: tuple[str, slice, int]) -> None:
        name, rows, offset = part
        weight = matrices[name][rows]
        plain = rtn.quantized({name: weight}, importance, {name: scheme}, scales)[name]
        _compare(weight, found.part(slice(offset, offset + len(weight))), factor, plain)

    side_by_side(compare, [*_runs(matrices)], workers)


def _runs(matrices: Mapping[str, Tensor]) -> Iterator[tuple[str, slice, int]]:
    """Yield name, rows, and the place of the first row, in runs that are rounded as the whole matrix would be.

    Loops are compiled for large matrices only, and a near tie may fall otherwise there: so no run is below `LEAST`
    where the matrix is not.
    """
    offset = 0
    for name, matrix in matrices.items():
        step = -(-LEAST // matrix.shape[1])
        starts = [*range(0, max(1, len(matrix) - step + 1), step)]
        for start, stop in zip(starts, [*starts[1:], len(matrix)], strict=True):
            yield name, slice(start, stop), offset + start
        offset += len(matrix)


def _together(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Return the rows of all ``tensors`` as one; what they share they hold as one object."""
    first, last = tensors[0].parameters, tensors[-1].parameters
    parameters = {
        key: value
        if value is last[key]
        else torch.cat([tensor.parameters[key] for tensor in tensors])
        for key, value in first.items()
    }
    codes = stacked([tensor.codes for tensor in tensors])
    return QuantizedTensor(codes, parameters, tensors[0].scheme)


def _compare(weight: Tensor, found: Solution, factor: Factor, plain: QuantizedTensor) -> None:
    scheme, parameters = plain.scheme, plain.parameters
    values = plain.decode()
    tile = scheme.granularity if isinstance(scheme.granularity, Tile) else None
    shared = {key: value for key, value in parameters.items() if len(value) != len(weight)}
    if not tile and all(torch.equal(found.parameters[key], shared[key]) for key in shared):
        for start in range(0, len(weight), ROWS):
            run = slice(start, start + ROWS)
            rows = start + _maybe_better(weight[run] - values[run], found.errors[run], factor)
            if len(rows):
                exact = _exactly(weight, values, found, scheme, factor, rows)
                better = (exact[0] < exact[1]).any(0)
                keys = parameters.keys() - shared.keys()
                _exchange(found, plain, rows[better], exact[0, 1, better], keys)
        return
    height = tile.rows if tile else len(weight)
    every = torch.arange(len(weight), device=weight.device)
    for band, start in enumerate(range(0, len(weight), height)):
        rows = every[start : start + height]
        error = weight[rows] - values[rows]
        if not factor.all_below(error, fsum(_limits(error, found.errors[rows], factor).tolist())):
            continue
        exact = _exactly(weight, values, found, scheme, factor, rows)
        plainly, kept = ([fsum(each.tolist()) for each in ways] for ways in exact)
        if any(one < two for one, two in zip(plainly, kept, strict=True)):
            _exchange(found, plain, rows, exact[0, 1], [])
            place = slice(band, band + 1) if tile else slice(None)
            for key, value in parameters.items():
                found.parameters[key][place] = value[place]


def _exchange(
    found: Solution, plain: QuantizedTensor, rows: Tensor, errors: Tensor, keys: Iterable[str]
) -> None:
    found.codes[rows], found.errors[rows], found.plain[rows] = plain.codes[rows], errors, True
    for key in keys:
        found.parameters[key][rows] = plain.parameters[key][rows]


def _maybe_better(error: Tensor, errors: Tensor, factor: Factor) -> Tensor:
    """Return the rows whose plain ``error`` ``[out, in]`` may be better than the objective ``errors`` ``[out]``."""
    return factor.below(error, _limits(error, errors, factor))[0]


def _limits(error: Tensor, errors: Tensor, factor: Factor) -> Tensor:
    """Return the limit that the objective of a better plain ``error`` is below: better without the ridge or with it."""
    return (errors.clamp(min=0) + factor.objective.of_ridge(error)) * (1 + MARGIN)


def _exactly(
    weight: Tensor, values: Tensor, found: Solution, scheme: Scheme, factor: Factor, rows: Tensor
) -> Tensor:
    """Return the error of some rows by plain rounding and as found, without and with the ridge: ``[2, 2, rows]``."""
    packer = packer_of(scheme)
    if scheme.whole:
        mine = packer.decode(found.codes, found.parameters, scheme)[rows]
    else:
        chosen = {key: value[rows] for key, value in found.parameters.items()}
        mine = packer.decode(found.codes[rows], chosen, scheme)
    wide = weight[rows].double()
    both = (wide - each.double() for each in (values[rows], mine))
    return torch.stack([factor.objective.exactly(error) for error in both])
