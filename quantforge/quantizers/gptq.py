"""GPTQ: the columns still to be rounded make up for the errors of those that were (Frantar et al., arXiv 2210.17323).

What happens to the matrices that read one input:

1. ``H`` is checked, damped and factorised once, its columns in processing order: ``"activation"`` takes them by
   falling ``H_jj``, ``"natural"`` as they are. Only the processing follows it: groups stay runs of input columns.
2. `feed_back` rounds the columns in turn. ``group_scales = "static"`` fits every group to the original weights before;
   ``"refresh"`` fits a group when its first column comes up.
3. A row keeps plain rounding where that has the smaller error.
4. ``refine`` sweeps of `Refinement` go over codes and scales again. Before them, searched static scales are fitted once
   more, to what step 2 really rounded, and step 2 is repeated; each row takes the better of the two.

A column that was 0 throughout calibration is coupled to no other: it is rounded plainly, not set to 0. A Hessian that
no damping makes positive definite means plain rounding, and an event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import fsum

import torch
from torch import Tensor

from quantforge.events import Event
from quantforge.packers import packer_of
from quantforge.quantizers import Rounded, Statistics, rtn
from quantforge.quantizers.feedback import Solution, feed_back
from quantforge.quantizers.hessian import Factor, checked_hessian, factorise
from quantforge.quantizers.refine import Refinement
from quantforge.recipe import GptqOptions, Recipe
from quantforge.scheme import PerGroup, PerTensor, ScaleType, Scheme
from quantforge.tensor import QuantizedTensor

ROWS = 4096  # worked off at a time: bounds the memory to about six times their float32 size


def round_shared(
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    schemes: Mapping[str, Scheme],
    recipe: Recipe,
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
    options = recipe.gptq
    factor = (
        factorise(hessian, options.damping, _order(diagonal, options))
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
        rounded = rtn.round_shared(weights, statistics, schemes, recipe)
        return _with_events(rounded, events)
    if factor.damping > options.damping:
        detail = f"{options.damping:g} raised to {factor.damping:g}"
        events.append(Event("damping-raised", names, detail))
    rounded = {}
    for scheme, members in _alike(schemes):
        matrices = {name: rtn.checked(name, weights[name]) for name in members}
        rounded |= _round_together(matrices, factor, scheme.stored_as(ScaleType.F16), recipe)
    return _with_events({name: rounded[name] for name in weights}, events)


def _order(diagonal: Tensor, options: GptqOptions) -> Tensor:
    if options.order == "natural":
        return torch.arange(len(diagonal), device=diagonal.device)
    return diagonal.argsort(descending=True, stable=True)


def _alike(schemes: Mapping[str, Scheme]) -> Iterator[tuple[Scheme, list[str]]]:
    """Yield the matrices that can be worked off as one tall matrix."""
    alike: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        if isinstance(scheme.granularity, PerTensor):
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
    matrices: Mapping[str, Tensor], factor: Factor, scheme: Scheme, recipe: Recipe
) -> dict[str, Rounded]:
    """Round several matrices as one, some rows at a time: rows do not see each other."""
    weight, names = torch.cat(list(matrices.values())), ", ".join(matrices)
    whole = isinstance(scheme.granularity, PerTensor)
    parts = torch.split(weight, len(weight) if whole else ROWS)
    found = _joined([_solve(names, part, factor, scheme, recipe) for part in parts])
    rounded, stop = {}, 0
    for name, matrix in matrices.items():
        rows = slice(stop, stop + len(matrix))
        stop = rows.stop
        mine = {key: value if whole else value[rows] for key, value in found.parameters.items()}
        tensor = QuantizedTensor(found.codes[rows], mine, scheme)
        sizes = (matrix.square() * factor.objective.diagonal).sum(1)
        figures = {
            "error": rtn.ratio(found.errors[rows], sizes),
            "rows_rtn": float(found.plain[rows].sum()),
        }
        rounded[name] = Rounded(tensor, rtn.vanished(name, matrix, tensor), figures)
    return rounded


def _joined(parts: list[Solution]) -> Solution:
    return Solution(
        {key: torch.cat([part.parameters[key] for part in parts]) for key in parts[0].parameters},
        torch.cat([part.codes for part in parts]),
        torch.cat([part.errors for part in parts]),
        torch.cat([part.plain for part in parts]),
    )


def _solve(names: str, weight: Tensor, factor: Factor, scheme: Scheme, recipe: Recipe) -> Solution:
    found = _run(names, weight, factor, scheme, recipe)
    packer = packer_of(scheme)
    codes = packer.encode(weight, found.parameters, scheme)
    errors = factor.objective.of_rows(weight - packer.decode(codes, found.parameters, scheme))
    plain = Solution(found.parameters, codes, errors, torch.ones_like(found.plain))
    found = found.mixed(plain, errors < found.errors)
    if recipe.gptq.refine:
        state = Refinement(weight, factor.objective, scheme, found.parameters, found.codes)
        for _ in range(recipe.gptq.refine):
            found.errors.sub_(state.sweep())
        found = replace(found, parameters=state.parameters, codes=state.codes)
    return found


def _run(names: str, weight: Tensor, factor: Factor, scheme: Scheme, recipe: Recipe) -> Solution:
    """Run GPTQ once, or twice and take the better of the two for each row (step 4 above)."""
    search = recipe.scales == "search"
    refresh = recipe.gptq.group_scales == "refresh" and isinstance(scheme.granularity, PerGroup)
    parameters = rtn.fitted(names, weight, scheme, factor.importance, search=search)
    first = feed_back(weight, factor, scheme, parameters, refresh=refresh, search=search)
    if refresh or not search or not recipe.gptq.refine:
        return replace(first, terms=None)
    targets = first.targets(factor, scheme)
    first = replace(first, terms=None)  # as large as the weight: freed before the second run
    parameters = rtn.fitted(names, targets, scheme, factor.importance, search=True)
    del targets
    second = feed_back(weight, factor, scheme, parameters)
    if isinstance(scheme.granularity, PerTensor):
        return min(first, second, key=lambda solution: fsum(solution.errors.tolist()))
    return first.mixed(second, second.errors < first.errors)
