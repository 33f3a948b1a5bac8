"""Rounding to nearest: each weight goes to the nearest point of its grid, whatever its neighbours do.

With ``scales = "search"`` the grid minimises ``sum_j h_j (w_j - q_j)^2`` over each group, ``h_j`` being the mean of
``x_j^2`` where it was observed and 1 otherwise: the diagonal of the Hessian that `gptq` uses whole. ``"absmax"``
covers the range of a group, and ``"reference"`` leaves scales and codes to ggml's own rules, so that a GGUF file
holds the bytes of llama-quantize.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.grids import ScaleType
from quantforge.model.statistics import Statistics
from quantforge.packers import weighed_codes
from quantforge.packers.ggml.packer import encode_rows
from quantforge.packers.lattices import LATTICES
from quantforge.packers.lattices.packer import encode_rows as lattice_rows
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers import Rounded
from quantforge.quantizers.matrices import checked, fitted, losses, named, of_rows, ratio, stacked
from quantforge.recipe import Rounding
from quantforge.scheme import Scheme

IMPORTANCE_FLOOR = (
    0.01  # of the mean: a column unseen in calibration still has to be stored sensibly
)


def round_shared(
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    schemes: Mapping[str, Scheme],
    rounding: Rounding,
) -> dict[str, Rounded]:
    """Round every matrix ``[out, in]`` that reads one shared input.

    Raises:
        InputError: a weight is not finite, or its scale is beyond its stored type.
    """
    found = quantized(weights, statistics.importance, schemes, rounding.scales)
    importance = judging(statistics, rounding)
    return {
        name: _judged(name, weights[name].detach().float(), importance, tensor)
        for name, tensor in found.items()
    }


def judging(statistics: Statistics, rounding: Rounding) -> Tensor | None:
    """Return what weighs the squares of columns ``[in]`` in the ``error`` of a rounded matrix."""
    if statistics.importance is None or rounding.scales == "reference":
        return statistics.importance
    return floored(statistics.importance)


def quantized(
    weights: Mapping[str, Tensor],
    importance: Tensor | None,
    schemes: Mapping[str, Scheme],
    scales: str,
) -> dict[str, QuantizedTensor]:
    """Return the tensors that `round_shared` stores, and nothing else.

    ``importance`` ``[in]`` is that of the columns, ``scales`` that of a `Rounding`.

    Raises:
        InputError: as there.
    """
    if scales == "reference":
        return {name: _as_ggml(name, weights[name], importance, schemes[name]) for name in weights}
    floor = None if importance is None else floored(importance)
    search = scales == "search"
    schemes = {name: scheme.with_scale(ScaleType.F16) for name, scheme in schemes.items()}
    found = {}
    for members in fitted_together(schemes):
        matrices = {name: checked(name, weights[name]) for name in members}
        names, scheme = ", ".join(members), schemes[members[0]]
        whole = stacked([*matrices.values()])
        parameters = fitted(names, whole, scheme, floor, search=search)
        del whole
        stop = 0
        for name, weight in matrices.items():
            rows = slice(stop, stop + len(weight))
            stop = rows.stop
            mine = parameters if len(members) == 1 else of_rows(parameters, rows)
            codes = weighed_codes(weight, mine, scheme, floor)
            found[name] = QuantizedTensor(codes, mine, scheme)
    return {name: found[name] for name in weights}


def fitted_together(schemes: Mapping[str, Scheme]) -> list[list[str]]:
    """Return names in lists, each to be fitted as one matrix: mostly of one name."""
    runs: dict[object, list[str]] = {}
    for name, scheme in schemes.items():
        runs.setdefault(scheme if scheme.joint else name, []).append(name)
    return list(runs.values())


def _as_ggml(
    name: str, weight: Tensor, importance: Tensor | None, scheme: Scheme
) -> QuantizedTensor:
    """Round with ggml's own codes: its importance has no floor."""
    with named(name):
        if scheme.grid in LATTICES:
            return lattice_rows(checked(name, weight), scheme, importance)
        return encode_rows(checked(name, weight), scheme, importance, "reference")


def _judged(
    name: str, weight: Tensor, importance: Tensor | None, tensor: QuantizedTensor
) -> Rounded:
    decoded = tensor.decode()
    events = losses(name, weight, tensor, decoded)
    sums = [squares(part, importance) for part in (decoded.sub_(weight), weight)]
    return Rounded(tensor, events, {"error": ratio(*sums)})


def squares(rows: Tensor, importance: Tensor | None) -> Tensor:
    """Return the sum of squares ``[rows]`` of each row of ``[rows, in]``, weighed by ``importance`` ``[in]``."""
    if importance is None:  # a norm takes half the time of squares and their sum
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms.double().square_()
    return rows.square().mul_(importance).sum(1)


def floored(importance: Tensor) -> Tensor:
    """Return ``importance``, at least `IMPORTANCE_FLOOR` of its mean; all ones when nothing was observed."""
    least = IMPORTANCE_FLOOR * importance.mean()
    return importance.clamp(min=least) if bool(least > 0) else torch.ones_like(importance)
