"""Round to nearest: each weight is rounded to the nearest point of its grid, independently of other weights.

With ``scales = "search"`` the scales minimize ``sum_j h_j (w_j - q_j)^2`` over each group, where ``h_j`` is the mean
of ``x_j^2`` if it was observed and 1 otherwise: the diagonal of the Hessian that `gptq` uses. ``"absmax"`` covers the
range of a group, and ``"reference"`` applies ggml's own rules for scales and codes, so that a GGUF file has the same
bytes as that of llama-quantize.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.grids import ScaleType
from quantforge.model.statistics import Statistics
from quantforge.packers import encode_with_importance
from quantforge.packers.ggml.packer import encode_rows
from quantforge.packers.lattices import LATTICES
from quantforge.packers.lattices.packer import encode_rows as lattice_rows
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers import Rounded
from quantforge.quantizers.matrices import (
    add_tensor_name,
    fit_parameters,
    loss_events,
    ratio,
    slice_parameters,
    stack_rows,
    to_finite_float32,
)
from quantforge.recipe import Rounding
from quantforge.scheme import Scheme

IMPORTANCE_FLOOR = 0.01  # of the mean: columns inactive in calibration keep some precision


def round_matrices(
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    schemes: Mapping[str, Scheme],
    rounding: Rounding,
) -> dict[str, Rounded]:
    """Round all matrices ``[out, in]`` that read one shared input to nearest.

    Raises:
        InputError: a weight is not finite, or its scale is outside the range of its stored type.
    """
    quantized = quantize_matrices(weights, statistics.importance, schemes, rounding.scales)
    importance = error_importance(statistics, rounding)
    return {
        name: _with_error(name, weights[name].detach().float(), importance, tensor)
        for name, tensor in quantized.items()
    }


def error_importance(statistics: Statistics, rounding: Rounding) -> Tensor | None:
    """Return the importance of columns ``[in]`` that weights squares in the ``error`` of a rounded matrix."""
    if statistics.importance is None or rounding.scales == "reference":
        return statistics.importance
    return floor_importance(statistics.importance)


def quantize_matrices(
    weights: Mapping[str, Tensor],
    importance: Tensor | None,
    schemes: Mapping[str, Scheme],
    scales: str,
) -> dict[str, QuantizedTensor]:
    """Quantize matrices as `round_matrices` does, without computing errors and events.

    ``importance`` ``[in]`` is that of the columns; ``scales`` is an option of `Rounding`.

    Raises:
        InputError: as `round_matrices`.
    """
    if scales == "reference":
        return {
            name: _round_like_ggml(name, weights[name], importance, schemes[name])
            for name in weights
        }
    floor = None if importance is None else floor_importance(importance)
    search = scales == "search"
    schemes = {name: scheme.with_scale(ScaleType.F16) for name, scheme in schemes.items()}
    quantized = {}
    for members in group_joint_matrices(schemes):
        matrices = {name: to_finite_float32(name, weights[name]) for name in members}
        names, scheme = ", ".join(members), schemes[members[0]]
        stacked = stack_rows([*matrices.values()])
        parameters = fit_parameters(names, stacked, scheme, floor, search=search)
        del stacked
        stop = 0
        for name, weight in matrices.items():
            rows = slice(stop, stop + len(weight))
            stop = rows.stop
            matrix_parameters = (
                parameters if len(members) == 1 else slice_parameters(parameters, rows)
            )
            codes = encode_with_importance(weight, matrix_parameters, scheme, floor)
            quantized[name] = QuantizedTensor(codes, matrix_parameters, scheme)
    return {name: quantized[name] for name in weights}


def group_joint_matrices(schemes: Mapping[str, Scheme]) -> list[list[str]]:
    """Group names of matrices whose parameters are fitted jointly; most groups have a single name."""
    runs: dict[object, list[str]] = {}
    for name, scheme in schemes.items():
        runs.setdefault(scheme if scheme.is_joint else name, []).append(name)
    return list(runs.values())


def _round_like_ggml(
    name: str, weight: Tensor, importance: Tensor | None, scheme: Scheme
) -> QuantizedTensor:
    """Round with ggml's own rules, for which importance has no floor."""
    with add_tensor_name(name):
        if scheme.grid in LATTICES:
            return lattice_rows(to_finite_float32(name, weight), scheme, importance)
        return encode_rows(to_finite_float32(name, weight), scheme, importance, "reference")


def _with_error(
    name: str, weight: Tensor, importance: Tensor | None, tensor: QuantizedTensor
) -> Rounded:
    decoded = tensor.decode()
    events = loss_events(name, weight, tensor, decoded)
    sums = [row_squares(matrix, importance) for matrix in (decoded.sub_(weight), weight)]
    return Rounded(tensor, events, {"error": ratio(*sums)})


def row_squares(rows: Tensor, importance: Tensor | None) -> Tensor:
    """Return the sum of squares ``[rows]`` of each row of ``[rows, in]``, weighted by ``importance`` ``[in]``."""
    if importance is None:  # a norm takes half the time of a sum of squares
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms.double().square_()
    return rows.square().mul_(importance).sum(1)


def floor_importance(importance: Tensor) -> Tensor:
    """Return ``importance`` clamped to at least `IMPORTANCE_FLOOR` of its mean; all ones if nothing was observed."""
    floor = IMPORTANCE_FLOOR * importance.mean()
    return importance.clamp(min=floor) if bool(floor > 0) else torch.ones_like(importance)
