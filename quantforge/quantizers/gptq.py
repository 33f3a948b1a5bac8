"""GPTQ: round one column at a time, and let the columns still to come make up for the error.

The error of a row is ``sum_j (E R)_j^2`` with ``E = W - Q`` and ``R`` upper triangular (see
`quantforge.quantizers.hessian`), so column ``j`` makes its term least by rounding not ``w_j`` but
``w_j + sum_(k<j) E_k R_kj / R_jj``. That gives the codes of Frantar et al., arXiv 2210.17323, without an inverse.
Columns are worked off in panels, so that nearly all of the arithmetic is matrix products.

``order = "activation"`` takes the columns by falling ``H_jj``; only the processing follows it, groups stay runs of
input columns. ``group_scales = "static"`` fits every group to the original weights before the loop; ``"refresh"``
fits a group when its first column comes up, to the values that its columns have by then, that is, moved to where
they make up best for all the errors so far.

A row keeps plain rounding where that has the smaller error, and then `refine` goes over codes and scales again. A
column that was 0 throughout calibration is coupled to no other: it is rounded plainly, not set to 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.events import Event
from quantforge.packers import packer_of
from quantforge.quantizers import Rounded, Statistics, rtn
from quantforge.quantizers.hessian import Factor, checked_hessian, factorise
from quantforge.quantizers.refine import Refinement
from quantforge.recipe import GptqOptions, Recipe
from quantforge.scheme import PerGroup, PerTensor, ScaleType, Scheme
from quantforge.tensor import QuantizedTensor

PANEL = 128  # columns that share one product with all the columns before them
STRIP = 32  # columns of a panel that share one product with those of the panel before them


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
        events.append(Event("rounding-fallback", names, "no activation was seen" if dead else why))
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
    weight = torch.cat(list(matrices.values()))
    best = _best(weight, factor, scheme, recipe)
    plain = _plain(weight, factor, scheme, best.parameters)
    whole = isinstance(scheme.granularity, PerTensor)
    kept = plain.errors < best.errors
    best = _better(best, plain, kept)
    if recipe.gptq.refine:
        state = Refinement(weight, factor.objective, scheme, best.parameters, best.codes)
        gained = sum(
            (state.sweep() for _ in range(recipe.gptq.refine)), torch.zeros_like(best.errors)
        )
        best = _Solution(state.parameters, state.codes, best.errors - gained)
    size = weight.square() @ factor.objective.diagonal
    rounded, stop = {}, 0
    for name, matrix in matrices.items():
        rows = slice(stop, stop + len(matrix))
        stop = rows.stop
        mine = {key: value if whole else value[rows] for key, value in best.parameters.items()}
        tensor = QuantizedTensor(best.codes[rows], mine, scheme)
        error = best.errors[rows].sum() / size[rows].sum(dtype=torch.float64)
        figures = {"error": float(error.nan_to_num(0.0)), "rows_rtn": float(kept[rows].sum())}
        rounded[name] = Rounded(tensor, rtn.vanished(name, matrix, tensor), figures)
    return rounded


@dataclass(frozen=True, slots=True, eq=False)
class _Solution:
    parameters: dict[str, Tensor]
    codes: Tensor  # [out, in]
    errors: Tensor  # of each row, float64 [out]
    targets: Tensor | None = None  # [out, in]: the values that the codes are nearest to


def _best(weight: Tensor, factor: Factor, scheme: Scheme, recipe: Recipe) -> _Solution:
    """Run GPTQ; before a refinement with searched scales, once more with scales fitted to what was rounded."""
    packer, search = packer_of(scheme), recipe.scales == "search"
    refresh = recipe.gptq.group_scales == "refresh" and isinstance(scheme.granularity, PerGroup)
    parameters = packer.fit(weight, scheme, factor.importance, search=search)
    first = _feed_back(weight, factor, scheme, parameters, (search if refresh else None))
    if not (search and recipe.gptq.refine and first.targets is not None):
        return first
    parameters = packer.fit(first.targets, scheme, factor.importance, search=True)
    second = _feed_back(weight, factor, scheme, parameters, None)
    if isinstance(scheme.granularity, PerTensor):
        return second if bool(second.errors.sum() < first.errors.sum()) else first
    return _better(first, second, second.errors < first.errors)


def _plain(
    weight: Tensor, factor: Factor, scheme: Scheme, parameters: dict[str, Tensor]
) -> _Solution:
    packer = packer_of(scheme)
    codes = packer.encode(weight, parameters, scheme)
    error = weight - packer.decode(codes, parameters, scheme)
    return _Solution(parameters, codes, factor.objective.of_rows(error))


def _better(one: _Solution, other: _Solution, rows: Tensor) -> _Solution:
    """Take the ``rows`` of ``other`` and the rest of ``one``."""
    choose = rows.unsqueeze(1)
    parameters = {
        key: value
        if value is other.parameters[key]
        else torch.where(choose, other.parameters[key], value)
        for key, value in one.parameters.items()
    }
    codes = torch.where(choose, other.codes, one.codes)
    return _Solution(parameters, codes, torch.where(rows, other.errors, one.errors))


def _feed_back(
    weight: Tensor,
    factor: Factor,
    scheme: Scheme,
    parameters: dict[str, Tensor],
    refresh: bool | None,
) -> _Solution:
    """Round the columns in turn; ``refresh`` fits each group as it begins, with or without a search."""
    packer, order, root = packer_of(scheme), factor.order, factor.root
    parameters = {key: value.clone() for key, value in parameters.items()}
    begins = {} if refresh is None else _first_columns(order, scheme, weight.shape[1])
    inverse = factor.inverse_root() if begins else root
    columns, pivots = order.tolist(), root.diagonal().tolist()
    # A column is a row here, in processing order: W where it is still to be rounded, E where it was.
    error = weight.T[order].contiguous()
    scaled = torch.empty_like(error)  # E R
    codes: list[Tensor] = []
    for start, stop in _panels(weight.shape[1], begins):
        if start in begins:
            group, members = begins[start]
            moved = error[members] - inverse[:start, members].T @ scaled[:start]
            importance = factor.importance[order[members]]
            fitted = packer.fit(moved.T, scheme, importance, search=bool(refresh))
            for key, value in fitted.items():
                parameters[key][:, group] = value[:, 0]
        pull = root[:start, start:stop].T @ error[:start]
        for first in range(start, stop, STRIP):
            last = min(first + STRIP, stop)
            strip = pull[first - start : last - start]
            strip += root[start:first, first:last].T @ error[start:first]
            for j in range(first, last):
                column = slice(columns[j], columns[j] + 1)
                target = error[j].add(strip[j - first], alpha=1 / pivots[j])
                codes.append(packer.encode(target.unsqueeze(1), parameters, scheme, column))
                value = packer.decode(codes[-1], parameters, scheme, column)[:, 0]
                torch.mul(target.sub_(value), pivots[j], out=scaled[j])
                error[j] -= value
                strip[j - first + 1 :].addr_(root[j, j + 1 : last], error[j])
    back = order.argsort()
    targets = weight - (error - scaled / root.diagonal().unsqueeze(1))[back].T
    errors = scaled.square().sum(0, dtype=torch.float64)
    return _Solution(parameters, torch.cat(codes, 1)[:, back], errors, targets)


def _first_columns(
    order: Tensor, scheme: Scheme, in_features: int
) -> dict[int, tuple[int, Tensor]]:
    """Map the place where a group's first column comes up to the group and the places of its columns."""
    places = order.argsort().view(-1, scheme.group_size(in_features))
    return {int(members.min()): (group, members) for group, members in enumerate(places)}


def _panels(in_features: int, begins: Mapping[int, object]) -> Iterator[tuple[int, int]]:
    """Yield panels of at most `PANEL` columns; where a group begins that is to be fitted, so does a panel."""
    yield from itertools.pairwise(sorted({*range(0, in_features, PANEL), *begins, in_features}))
