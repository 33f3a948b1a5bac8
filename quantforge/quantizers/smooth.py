"""SmoothQuant: hand outliers of an activation over to the weights that read it (Xiao et al., arXiv 2211.10438).

For ``y = W x`` and positive ``s``, ``y = (W diag(s)) (x / s)``. Where the input is rounded to 8 bits under one range
for all channels of a token, a channel that is a hundred times larger than the rest leaves them next to nothing; where
each row of a weight has one scale, it hardly minds. With strength ``p``,

    s_j = max|x_j|^p / max|w_j|^(1 - p)

divides ``x`` in what produces it and multiplies the columns of its readers. The paper takes one ``p`` for a model; here
every pair that is declared (a norm and its readers, v and o, up and down) gets the one of a grid that leaves the least
error at the outputs of the readers, inputs rounded as they will be and weights plainly. Leaving the pair alone is
on the grid, and it is what happens where no factor could be stored exactly
(`quantforge.quantizers.scale_pairs.obstacle`).
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
from quantforge.packers import packer_of
from quantforge.packers.input_rounding import largest_input, simulate
from quantforge.quantizers import Transformed
from quantforge.quantizers.scale_pairs import folded, powers_of_two, rescaled, storable, tied
from quantforge.recipe import Rounding
from quantforge.scheme import Activation, LayerScheme, Scheme

POINTS = 20  # of the grid of strengths
TOKENS = 2048  # that errors are measured on
FLOOR = 1e-5  # of the largest: peaks below count as that


@dataclass(frozen=True, slots=True)
class _Smoothed:
    strength: float | None
    scale: Tensor
    error: float


@torch.no_grad()
def apply(
    part: DecoderBlock,
    statistics: Mapping[str, Statistics],
    layers: Mapping[str, LayerScheme],
    rounding: Rounding,
) -> Transformed:
    """Smooth every declared pair of a block, in computing order; the block is changed in place.

    Args:
        part: the block.
        statistics: by `SharedInput.key`; the peaks are needed of every input that is read quantized.
        layers: the linears that will be quantized.
        rounding: ``awq.rows`` calibration rows are looked at.

    Returns:
        The statistics of the changed block; a ``pair-skipped`` event for every pair that could not be stored; and
        per pair its ``strength`` (-1: left alone) and ``error`` (as a fraction of that without smoothing).
    """
    changed, events, figures = dict(statistics), [], {}
    for shared in part.inputs:
        readers = [name for name in shared.linears if name in layers]
        if shared.scale_fold is None or not readers:
            continue
        schemes = {name: layers[name].weight for name in readers}
        pair = _SmoothPair(part, shared, schemes, layers[readers[0]].input)
        found = pair.search(statistics[shared.key], rounding.awq.rows)
        if found.strength is not None:
            skipped = folded(part, shared, layers, found.scale)
            if skipped:
                events.append(skipped)
                continue
            changed[shared.key] = rescaled(changed[shared.key], found.scale)
        strength = -1.0 if found.strength is None else found.strength
        figures[shared.key] = {"strength": strength, "error": found.error}
    return Transformed(changed, tuple(events), figures)


class _SmoothPair:
    """An activation with its readers, ready to try strengths on."""

    def __init__(
        self,
        part: DecoderBlock,
        shared: SharedInput,
        schemes: Mapping[str, Scheme],
        activation: Activation | None,
    ) -> None:
        self._part, self._shared, self._schemes = part, shared, schemes
        self._activation = activation
        self._weights = {name: part.weight(name).clone() for name in schemes}
        self._powers = powers_of_two(part, shared, schemes)

    def search(self, statistics: Statistics, rows: int) -> _Smoothed:
        """Return the best strength with its factors; None as strength where the pair is best as it is."""
        assert statistics.peaks is not None
        x = self._inputs(rows)
        wanted = {name: matmul(x, weight.T) for name, weight in self._weights.items()}
        sizes = {name: total(output.square()) or 1.0 for name, output in wanted.items()}

        def error(scale: Tensor) -> float:
            peak = float((statistics.peaks / scale).max()) if statistics.peaks is not None else 0.0
            seen = self._seen(x / scale, peak)
            outputs = {name: matmul(seen, self._rounded(name, scale).T) for name in wanted}
            return sum(
                total((outputs[name] - wanted[name]).square()) / sizes[name] for name in wanted
            )

        peaks = _log(self._tied(statistics.peaks))
        columns = torch.cat(list(self._weights.values())).abs().amax(0)
        columns = _log(self._tied(columns))
        plain = torch.ones_like(peaks)
        best = _Smoothed(None, plain, first := error(plain))
        for step in range(POINTS + 1):
            strength = step / POINTS
            logs = strength * peaks - (1 - strength) * columns
            scale = storable(self._part, self._shared, logs, self._powers)
            if (found := error(scale)) < best.error:
                best = _Smoothed(strength, scale, found)
        return _Smoothed(best.strength, best.scale, best.error / first if first else 1.0)

    def _inputs(self, rows: int) -> Tensor:
        calls = self._part.capture(self._shared.key, rows)
        x = torch.cat([call.args[0].reshape(-1, call.args[0].shape[-1]) for call in calls])
        return x[:: max(1, len(x) // TOKENS)]

    def _seen(self, x: Tensor, peak: float) -> Tensor:
        """Return the input as the layer sees it; a static range is that of all of calibration."""
        activation = self._activation
        if activation is None:
            return x
        if activation.dynamic:
            return simulate(x, activation)
        scale = torch.tensor([[max(peak, 1e-12) / largest_input(activation.grid)]])
        return simulate(x, activation, scale.to(x.device))

    def _rounded(self, name: str, scale: Tensor) -> Tensor:
        """Return the weight of a reader with its columns scaled, rounded."""
        scheme, scaled = self._schemes[name].with_scale(ScaleType.F16), self._weights[name] * scale
        packer = packer_of(scheme)
        parameters = packer.fit(scaled, scheme)
        return packer.decode(packer.encode(scaled, parameters, scheme), parameters, scheme)

    def _tied(self, peaks: Tensor) -> Tensor:
        """Return for each column the largest value over the columns that share a factor with it."""
        return tied(self._part, self._shared, peaks, lambda heads: heads.amax(1))


def _log(peaks: Tensor) -> Tensor:
    return peaks.clamp(min=max(float(peaks.max()) * FLOOR, 1e-30)).log2()
