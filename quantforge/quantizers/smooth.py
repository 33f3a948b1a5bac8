"""SmoothQuant: move outliers of an activation into the weights that read it (Xiao et al., arXiv 2211.10438).

For ``y = W x`` and positive ``s``, ``y = (W diag(s)) (x / s)``. If the input is rounded to 8 bits with one range for
all channels of a token, a channel a hundred times larger than the others leaves them almost no precision; a weight with
one scale per row is hardly affected. With strength ``p``,

    s_j = max|x_j|^p / max|w_j|^(1 - p)

divides ``x`` in the layer that produces it and multiplies the columns of its readers. The paper uses one ``p`` for a
model; here each declared pair (a norm and its readers, v and o, up and down) uses the grid point with the smallest
error at the outputs of the readers, with inputs rounded as configured and weights rounded to nearest. Leaving the pair
unchanged is one of the candidates, and is also the fallback if no factor can be stored exactly
(`quantforge.quantizers.scale_pairs.storage_obstacle`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.architectures import SharedInput
from quantforge.grids import ScaleType
from quantforge.model.block import DecoderBlock
from quantforge.model.statistics import Statistics
from quantforge.numerics.products import matmul
from quantforge.numerics.values import total
from quantforge.packers import get_packer
from quantforge.packers.input_rounding import fake_quantize_input, max_input
from quantforge.quantizers import TransformResult
from quantforge.quantizers.scale_pairs import (
    fold_if_storable,
    join_tied_columns,
    needs_powers_of_two,
    rescale_statistics,
    storable_factors,
)
from quantforge.recipe import Rounding
from quantforge.scheme import Activation, LayerScheme, Scheme

GRID_POINTS = 20  # intervals of the grid of strengths
MEASURED_TOKENS = 2048  # tokens used to measure errors
PEAK_FLOOR = 1e-5  # of the largest peak: lower limit of peaks


@dataclass(frozen=True, slots=True)
class _StrengthCandidate:
    strength: float | None
    scale: Tensor
    error: float


@torch.no_grad()
def apply(
    block: DecoderBlock,
    statistics: Mapping[str, Statistics],
    layers: Mapping[str, LayerScheme],
    rounding: Rounding,
) -> TransformResult:
    """Smooth each declared pair of a block, in order of computation, in place.

    Args:
        block: the block.
        statistics: statistics by `SharedInput.key`; peaks are required for each input read by a quantized linear.
        layers: schemes of the linears that will be quantized.
        rounding: ``awq.search_samples`` is the number of calibration rows used.

    Returns:
        The statistics of the changed block; a ``scale-fold-skipped`` event for each pair that could not be stored; and
        per pair its ``strength`` (-1: unchanged) and ``error`` (relative to the error without smoothing).
    """
    new_statistics, events, metrics = dict(statistics), [], {}
    for shared in block.inputs:
        readers = [name for name in shared.linears if name in layers]
        if shared.scale_fold is None or not readers:
            continue
        schemes = {name: layers[name].weight for name in readers}
        pair = _StrengthSearch(block, shared, schemes, layers[readers[0]].input)
        best = pair.search(statistics[shared.key], rounding.awq.search_samples)
        if best.strength is not None:
            fold_failure = fold_if_storable(block, shared, layers, best.scale)
            if fold_failure:
                events.append(fold_failure)
                continue
            new_statistics[shared.key] = rescale_statistics(new_statistics[shared.key], best.scale)
        strength = -1.0 if best.strength is None else best.strength
        metrics[shared.key] = {"strength": strength, "error": best.error}
    return TransformResult(new_statistics, tuple(events), metrics)


class _StrengthSearch:
    """Search for the best strength of one activation with its readers."""

    def __init__(
        self,
        block: DecoderBlock,
        shared: SharedInput,
        schemes: Mapping[str, Scheme],
        activation: Activation | None,
    ) -> None:
        self._block, self._shared, self._schemes = block, shared, schemes
        self._activation = activation
        self._weights = {name: block.weight(name).clone() for name in schemes}
        self._powers = needs_powers_of_two(block, shared, schemes)

    def search(self, statistics: Statistics, rows: int) -> _StrengthCandidate:
        """Return the best strength with its factors; the strength is None if no change is best."""
        assert statistics.peaks is not None
        x = self._inputs(rows)
        reference_outputs = {name: matmul(x, weight.T) for name, weight in self._weights.items()}
        sizes = {name: total(output.square()) or 1.0 for name, output in reference_outputs.items()}

        def error(scale: Tensor) -> float:
            peak = float((statistics.peaks / scale).max()) if statistics.peaks is not None else 0.0
            quantized_input = self._quantize_input(x / scale, peak)
            outputs = {
                name: matmul(quantized_input, self._rounded(name, scale).T)
                for name in reference_outputs
            }
            return sum(
                total((outputs[name] - reference_outputs[name]).square()) / sizes[name]
                for name in reference_outputs
            )

        peaks = _floored_log2(self._max_tied(statistics.peaks))
        columns = torch.cat(list(self._weights.values())).abs().amax(0)
        columns = _floored_log2(self._max_tied(columns))
        unit_scale = torch.ones_like(peaks)
        best = _StrengthCandidate(None, unit_scale, first := error(unit_scale))
        for step in range(GRID_POINTS + 1):
            strength = step / GRID_POINTS
            logs = strength * peaks - (1 - strength) * columns
            scale = storable_factors(self._block, self._shared, logs, self._powers)
            if (candidate_error := error(scale)) < best.error:
                best = _StrengthCandidate(strength, scale, candidate_error)
        return _StrengthCandidate(best.strength, best.scale, best.error / first if first else 1.0)

    def _inputs(self, rows: int) -> Tensor:
        calls = self._block.capture_calls(self._shared.key, rows)
        x = torch.cat([call.args[0].reshape(-1, call.args[0].shape[-1]) for call in calls])
        return x[:: max(1, len(x) // MEASURED_TOKENS)]

    def _quantize_input(self, x: Tensor, peak: float) -> Tensor:
        """Return the input quantized as the layer does; a static range is that of all calibration rows."""
        activation = self._activation
        if activation is None:
            return x
        if activation.dynamic:
            return fake_quantize_input(x, activation)
        scale = torch.tensor([[max(peak, 1e-12) / max_input(activation.grid)]])
        return fake_quantize_input(x, activation, scale.to(x.device))

    def _rounded(self, name: str, scale: Tensor) -> Tensor:
        """Return the weight of a reader with its columns scaled, then rounded."""
        scheme, scaled = self._schemes[name].with_scale(ScaleType.F16), self._weights[name] * scale
        packer = get_packer(scheme)
        parameters = packer.fit(scaled, scheme)
        return packer.decode(packer.encode(scaled, parameters, scheme), parameters, scheme)

    def _max_tied(self, peaks: Tensor) -> Tensor:
        """Return for each column the largest value over the columns that share a factor with it."""
        return join_tied_columns(self._block, self._shared, peaks, lambda heads: heads.amax(1))


def _floored_log2(peaks: Tensor) -> Tensor:
    return peaks.clamp(min=max(float(peaks.max()) * PEAK_FLOOR, 1e-30)).log2()
