"""GPTQ: the columns still to be rounded make up for the errors of those that were (Frantar et al., arXiv 2210.17323).

What happens to the matrices that read one input:

1. ``H`` is checked, damped and factorised once, its columns in processing order, by falling ``H_jj``. Only the
   processing follows it: groups stay runs of input columns.
2. Every group is fitted to the original weights, then `feed_back` rounds the columns in turn.
3. A row goes back to plain rounding where that has the smaller error.
4. Where scales are searched, they are fitted once more, to the targets that step 2 rounded, and step 2 is
   repeated, in all ``runs`` times (0: `Grid.runs`, once without ``refine``); each row takes the best. On a small
   llama a second run took 7 % off the divergence at 2 bits, 3 % at 3 and 2 % at 4. Codebooks and floats do the same.
   Scales under one number of the whole matrix are fitted under the number that the first run had.
5. ``refine`` sweeps of `Refinement` go over codes and scales again, for grids that have `refits`. No sweep raises
   the error of a row.
6. A row that plain rounding with scales of its own makes better is given up for what `rtn` writes (`plain_rows`).

A column that was 0 throughout calibration is coupled to no other: it is rounded plainly, not set to 0. A Hessian that
no damping makes positive definite means plain rounding, and an event.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantforge.events import Event
from quantforge.grids import GRIDS, ScaleType
from quantforge.model.statistics import Statistics
from quantforge.numerics.threads import side_by_side
from quantforge.packers import fp4, packer_of
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers import COMPILED_FROM, Rounded, rtn
from quantforge.quantizers.feedback import Solution, feed_back, stacked
from quantforge.quantizers.hessian import Factor, checked_hessian, factorise
from quantforge.quantizers.plain_rows import keep_better
from quantforge.quantizers.refine import TOGETHER, Refinement
from quantforge.recipe import Rounding
from quantforge.scheme import Scheme

ROWS = 1024  # worked off at a time
WORKERS = 2  # parts at once: about five times their float32 size in memory
PLAIN_ROWS = 512  # of them, compared with plain rounding at a time


def round_shared(
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    schemes: Mapping[str, Scheme],
    rounding: Rounding,
) -> dict[str, Rounded]:
    """Round every matrix ``[out, in]`` that reads one shared input: one factorisation serves them all.

    Raises:
        InputError: a weight or the Hessian is not finite, or a scale is beyond its stored type.
    """
    names = ", ".join(weights)
    if statistics.hessian is None:
        raise ValueError(f"{names}: gptq needs the Hessian")
    hessian = checked_hessian(statistics.hessian, names)
    diagonal = hessian.diagonal()
    dead = int((diagonal == 0).sum())
    events = (
        [Event("dead-channels", names, f"{dead} of {len(diagonal)} input columns")] if dead else []
    )
    options = rounding.gptq
    grids = [GRIDS[scheme.grid] for scheme in schemes.values()]
    width = math.lcm(*(grid.weights_per_code for grid in grids))
    shrunk = options.shrinkage
    shrinkage = max(grid.shrinkage for grid in grids) if shrunk is None else shrunk
    importance = statistics.importance if rounding.weighs else None  # as `rtn` is given it
    factor = (
        factorise(hessian, options.damping, _order(diagonal, width), shrinkage)
        if dead < len(diagonal)
        else None
    )
    if factor is None:
        why = "no damping up to the mean of its diagonal makes the Hessian positive definite"
        events.append(
            Event(
                "rounding-fallback",
                names,
                "no activation was seen" if dead == len(diagonal) else why,
            )
        )
        plainly = Statistics(tokens=statistics.tokens, squares=importance)
        return _with_events(rtn.round_shared(weights, plainly, schemes, rounding), events)
    if factor.damping > options.damping:
        detail = f"{options.damping:g} raised to {factor.damping:g}"
        events.append(Event("damping-raised", names, detail))
    rounded: dict[str, Rounded] = {}
    for scheme, members in _alike(schemes):
        matrices = {name: rtn.checked(name, weights[name]) for name in members}
        rounded |= _round_together(
            matrices, factor, scheme.stored_as(ScaleType.F16), rounding, importance
        )
    return _with_events({name: rounded[name] for name in weights}, events)


def _order(diagonal: Tensor, width: int) -> Tensor:
    """Return the columns by falling activation; ``width`` neighbours, which may share a code, stay together."""
    columns = torch.arange(len(diagonal), device=diagonal.device)
    panels = diagonal.view(-1, width).sum(1).argsort(descending=True, stable=True)
    return columns.view(-1, width)[panels].flatten()


def _alike(schemes: Mapping[str, Scheme]) -> Iterator[tuple[Scheme, list[str]]]:
    """Yield the matrices that can be worked off as one tall matrix."""
    alike: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        if scheme.whole and not scheme.joint:
            yield scheme, [name]
        else:
            alike.setdefault(scheme, []).append(name)
    yield from alike.items()


def _with_events(rounded: dict[str, Rounded], events: list[Event]) -> dict[str, Rounded]:
    """Attach the events of the shared input to its first matrix, once."""
    first = next(iter(rounded))
    found = rounded[first]
    return rounded | {first: Rounded(found.tensor, (*events, *found.events), found.figures)}


def _round_together(
    matrices: Mapping[str, Tensor],
    factor: Factor,
    scheme: Scheme,
    rounding: Rounding,
    importance: Tensor | None,
) -> dict[str, Rounded]:
    """Round several matrices as one, some rows at a time: rows do not see each other."""
    names = ", ".join(matrices)
    parts = [*_parts([*matrices.values()], None if scheme.whole else ROWS)]
    large = factor.root.device.type == "cpu" and ROWS * len(factor.root) >= COMPILED_FROM

    def solved(part: list[Tensor]) -> Solution:
        return _solve(names, stacked(part), factor, scheme, rounding)

    workers = WORKERS if large else 1
    found = _joined(side_by_side(solved, parts, workers))
    keep_better(matrices, found, factor, scheme, importance, rounding.scales, workers)
    rounded, stop = {}, 0
    for name, matrix in matrices.items():
        rows = slice(stop, stop + len(matrix))
        stop = rows.stop
        alone = len(matrices) == 1
        mine = found.parameters if alone else rtn.of_rows(found.parameters, rows)
        tensor = QuantizedTensor(found.codes[rows], mine, scheme)
        sizes = (matrix.square() * factor.objective.diagonal).sum(1)
        figures = {
            "error": rtn.ratio(found.errors[rows], sizes),
            "rows_rtn": float(found.plain[rows].sum()),
        }
        rounded[name] = Rounded(tensor, rtn.losses(name, matrix, tensor, tensor.decode()), figures)
    return rounded


def _parts(matrices: Sequence[Tensor], rows: int | None) -> Iterator[list[Tensor]]:
    """Yield the rows of all matrices in turn, at most so many at once; small matrices share a part."""
    waiting: list[Tensor] = []
    pieces = (torch.split(matrix, rows or len(matrix)) for matrix in matrices)
    for piece in itertools.chain.from_iterable(pieces):
        if waiting and rows and sum(map(len, waiting)) + len(piece) > rows:
            yield waiting
            waiting = []
        waiting.append(piece)
    yield waiting


def _joined(parts: list[Solution]) -> Solution:
    return Solution(
        {key: torch.cat([part.parameters[key] for part in parts]) for key in parts[0].parameters},
        torch.cat([part.codes for part in parts]),
        torch.cat([part.errors for part in parts]),
        torch.cat([part.plain for part in parts]),
    )


def _solve(
    names: str, weight: Tensor, factor: Factor, scheme: Scheme, rounding: Rounding
) -> Solution:
    found = _run(names, weight, factor, scheme, rounding)
    if rounding.gptq.refine and packer_of(scheme).refits(scheme, weight.shape[1]):
        state = Refinement(weight, factor.objective, scheme, found.parameters, found.codes)
        for done in range(0, rounding.gptq.refine, TOGETHER):
            found.errors.sub_(state.sweep(min(TOGETHER, rounding.gptq.refine - done)))
        found = replace(found, parameters=state.parameters, codes=state.codes)
        del state
    return found


def _keep_plain(weight: Tensor, factor: Factor, scheme: Scheme, found: Solution) -> None:
    """Give those rows their plain codes back that are better with them."""
    packer = packer_of(scheme)
    plain = packer.encode(weight, found.parameters, scheme)
    whole = packer.decode(plain, found.parameters, scheme) if scheme.whole else None
    for start in range(0, len(weight), PLAIN_ROWS):
        run = slice(start, start + PLAIN_ROWS)
        mine = rtn.of_rows(found.parameters, run)
        values = packer.decode(plain[run], mine, scheme) if whole is None else whole[run]
        rows, errors = factor.below(weight[run] - values, found.errors[run])
        found.codes[run][rows], found.errors[run][rows] = plain[run][rows], errors
        found.plain[run][rows] = True


def _run(
    names: str, weight: Tensor, factor: Factor, scheme: Scheme, rounding: Rounding
) -> Solution:
    """Run GPTQ as often as the grid has it, and take the best of the runs for each row (step 4 above)."""
    search = rounding.scales == "search"
    parameters = rtn.fitted(names, weight, scheme, factor.importance, search=search)
    left = rounding.gptq.runs_of(GRIDS[scheme.grid].runs) - 1 if search else 0
    best = feed_back(weight, factor, scheme, parameters, keep=left > 0)
    targets = best.targets(factor, scheme) if left else None
    best = replace(best, terms=None)  # as large as the weight: freed before the next run
    _keep_plain(weight, factor, scheme, best)
    while targets is not None:
        left -= 1
        parameters = _fitted_again(names, targets, scheme, factor, best)
        del targets
        found = feed_back(weight, factor, scheme, parameters, keep=left > 0)
        targets = found.targets(factor, scheme) if left else None
        found = replace(found, terms=None)
        best = best.or_better(found, scheme)
    return best


def _fitted_again(
    names: str, targets: Tensor, scheme: Scheme, factor: Factor, before: Solution
) -> dict[str, Tensor]:
    if not scheme.divided:
        return rtn.fitted(names, targets, scheme, factor.importance, search=True)
    return fp4.fit_under(targets, before.parameters, scheme, factor.importance)
