"""GPTQ: round one column at a time, and let the columns still to come make up for the error.

The error of a row is ``E (H + ridge I) E^T`` with ``E = W - Q`` (see `quantforge.quantizers.hessian`). With
``(H + ridge I)^-1 = U^T U``, ``U`` upper triangular, the column ``j`` in turn leaves ``e_j = (w_j - q_j) / U_jj``, the
later columns move by ``-e_j U_jk``, and the error of the whole row is exactly ``sum_j e_j^2`` (Frantar et al., arXiv
2210.17323, section 3).

``order = "activation"`` takes the columns by falling ``H_jj``; only the processing follows it, groups stay runs of
input columns. ``group_scales = "static"`` fits every group to the original weights before the loop; ``"refresh"``
fits a group when its first column comes up, to the values that its columns have by then. Columns are worked off in
panels, so that nearly all of the arithmetic is matrix products.

A row keeps plain rounding where that has the smaller error. A column that was 0 throughout calibration has no say in
the error of the others and none of them in its own: it is rounded plainly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from quantforge.events import Event
from quantforge.packers import packer_of
from quantforge.quantizers import Rounded, Statistics, rtn
from quantforge.quantizers.hessian import Factor, checked_hessian, factorise
from quantforge.recipe import GptqOptions, Recipe
from quantforge.scheme import PerGroup, PerTensor, ScaleType, Scheme
from quantforge.tensor import QuantizedTensor

PANEL = 128  # columns between two updates of all the columns to come
STRIP = 32  # columns of a panel between two updates of the rest of the panel


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
    parameters, codes, errors = feed_back(weight, factor, scheme, recipe)
    norms = factor.objective.of_rows(weight)
    plain = _keep_plain_rows(weight, factor, scheme, parameters, codes, errors)
    rounded, stop = {}, 0
    for name, matrix in matrices.items():
        rows = slice(stop, stop + len(matrix))
        stop = rows.stop
        whole = isinstance(scheme.granularity, PerTensor)
        mine = parameters if whole else {key: value[rows] for key, value in parameters.items()}
        tensor = QuantizedTensor(codes[rows], mine, scheme)
        error = errors[rows].sum() / norms[rows].sum()
        figures = {"error": float(error.nan_to_num(0.0)), "rows_rtn": float(plain[rows].sum())}
        rounded[name] = Rounded(tensor, rtn.vanished(name, matrix, tensor), figures)
    return rounded


def feed_back(
    weight: Tensor, factor: Factor, scheme: Scheme, recipe: Recipe
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Round ``weight`` ``[out, in]``; return parameters, codes ``[out, in]`` and the error of each row ``[out]``."""
    packer, search = packer_of(scheme), recipe.scales == "search"
    importance, inverse, order = factor.objective.diagonal, factor.inverse, factor.order
    parameters = packer.fit(weight, scheme, importance, search=search)
    refresh = recipe.gptq.group_scales == "refresh" and isinstance(scheme.granularity, PerGroup)
    begins = _first_columns(order, scheme, weight.shape[1]) if refresh else {}
    working = weight.T[order].contiguous()  # a column is a contiguous row
    codes: Tensor | None = None
    errors = weight.new_zeros(len(weight), dtype=torch.float64)
    for start, stop in _panels(weight.shape[1], begins):
        if start in begins:
            group, positions = begins[start]
            columns = order[positions]
            fitted = packer.fit(working[positions].T, scheme, importance[columns], search=search)
            for key, value in fitted.items():
                parameters[key][:, group] = value[:, 0]
        scaled, panel = _panel(
            working[start:stop],
            inverse[start:stop, start:stop],
            parameters,
            scheme,
            order[start:stop],
        )
        codes = panel.new_empty(working.shape) if codes is None else codes
        codes[start:stop] = panel
        errors += scaled.square().sum(0, dtype=torch.float64)
        working[stop:].addmm_(inverse[start:stop, stop:].T, scaled, alpha=-1)
    assert codes is not None
    return parameters, codes[order.argsort()].T.contiguous(), errors


def _panel(
    working: Tensor,
    inverse: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: Tensor,
) -> tuple[Tensor, Tensor]:
    """Round the columns ``[n, out]`` of one panel; return the scaled errors ``e_j`` and the codes, both ``[n, out]``."""
    packer = packer_of(scheme)
    scaled, codes = torch.empty_like(working), []
    pivots = inverse.diagonal().tolist()
    for start in range(0, len(working), STRIP):
        stop = min(start + STRIP, len(working))
        for j in range(start, stop):
            value = working[j].unsqueeze(1)
            codes.append(packer.encode(value, parameters, scheme, columns[j : j + 1]))
            value = value - packer.decode(codes[-1], parameters, scheme, columns[j : j + 1])
            torch.div(value[:, 0], pivots[j], out=scaled[j])
            working[j + 1 : stop].addr_(inverse[j, j + 1 : stop], scaled[j], alpha=-1)
        working[stop:].addmm_(inverse[start:stop, stop:].T, scaled[start:stop], alpha=-1)
    return scaled, torch.cat(codes, 1).T


def _first_columns(
    order: Tensor, scheme: Scheme, in_features: int
) -> dict[int, tuple[int, Tensor]]:
    """Map the position at which a group's first column comes up to the group and the positions of its columns."""
    size = scheme.group_size(in_features)
    position = order.argsort().view(-1, size)
    return {int(columns.min()): (group, columns) for group, columns in enumerate(position)}


def _panels(in_features: int, begins: Mapping[int, object]) -> Iterator[tuple[int, int]]:
    """Yield panels of at most `PANEL` columns; none spans the beginning of a group that is still to be fitted."""
    cuts = sorted({*range(0, in_features, PANEL), *begins, in_features})
    yield from itertools.pairwise(cuts)


def _keep_plain_rows(
    weight: Tensor,
    factor: Factor,
    scheme: Scheme,
    parameters: Mapping[str, Tensor],
    codes: Tensor,
    errors: Tensor,
) -> Tensor:
    """Put plain rounding into the rows of ``codes`` and ``errors`` where it is better; return which ``[out]``."""
    packer = packer_of(scheme)
    plain = packer.encode(weight, parameters, scheme)
    plain_errors = factor.objective.of_rows(weight - packer.decode(plain, parameters, scheme))
    better = plain_errors < errors
    codes[better], errors[better] = plain[better], plain_errors[better]
    return better
