"""Inputs of linear layers, rounded at run time: what an engine does to them, and ranges that calibration measured.

A dynamic range is that of a token, of a run of its channels, or of the whole tensor; the scale is ``absmax / 127`` for
int8, ``absmax / 448`` for e4m3, a power of two for the mx grids. A static one is a single scale, found beforehand by an
observer from a histogram of magnitudes: ``absmax`` covers everything that was seen, ``percentile`` all but 1 in 10 000
values, ``mse`` minimises the squared error. The static scale of nvfp4 covers everything whatever the observer: below
it each group of 16 has an e4m3 scale of its own, found at run time.

With a ``threshold``, columns in which any value is larger are left as they are (LLM.int8(), arXiv 2208.07339), and so
are those that calibration chose to keep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.packers.fp4 import (
    E2M1_LARGEST,
    E4M3_LARGEST,
    e8m0_exponents,
    nearest_e2m1,
    nearest_scales,
    power_of_two,
)
from quantforge.packers.fp8 import cast, largest
from quantforge.scheme import Activation

BINS = 1 << 15  # of magnitudes: sign, exponent and 7 bits of mantissa make 16 bits
PERCENTILE = 0.9999
FRACTIONS = tuple(1.0 - 0.02 * step for step in range(40))
TINY = 1e-12


def histogram(x: Tensor) -> Tensor:
    """Count magnitudes by the upper 16 bits of their float32, int64 ``[BINS]``: the same in any order of tokens."""
    bits = x.detach().abs().float().contiguous().view(torch.int32) >> 16
    return torch.bincount(bits.flatten(), minlength=BINS)


def largest_input(grid: str) -> float:
    """Return the largest magnitude that an input can have under a static scale of 1."""
    if grid == "nvfp4":
        return E4M3_LARGEST * E2M1_LARGEST
    return 127.0 if grid == "int8" else largest(grid)


def static_scale(activation: Activation, counts: Tensor, peak: float, observer: str) -> float:
    """Return the scale of a static input, positive.

    Args:
        activation: how the input is rounded.
        counts: `histogram` of what calibration saw.
        peak: the largest magnitude seen.
        observer: ``absmax``, ``percentile`` or ``mse``.
    """
    limit = largest_input(activation.grid)
    if activation.grid == "nvfp4":  # groups find their own range below the largest
        return max(peak, TINY) / limit
    values = (torch.arange(BINS, dtype=torch.int32) << 16).view(torch.float32)
    seen = counts.cpu() > 0
    values, weights = values[seen].double(), counts.cpu()[seen].double()
    if observer == "percentile":
        total = weights.cumsum(0)
        peak = float(values[int((total < PERCENTILE * total[-1]).sum())])
    elif observer == "mse":

        def error(fraction: float) -> float:
            missed = values - _rounded(values, fraction * peak / limit, activation.grid)
            return float((weights * missed**2).sum())

        peak *= min(FRACTIONS, key=error)
    return max(peak, TINY) / limit


def _rounded(values: Tensor, scale: float, grid: str) -> Tensor:
    scaled = values / max(scale, TINY)
    if grid == "int8":
        return scaled.round().clamp(-128, 127) * scale
    return cast(scaled.float(), grid).double() * scale


def simulate(
    x: Tensor,
    activation: Activation,
    scale: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Return ``x`` ``[tokens, in]`` as an engine's kernel sees it, in float32.

    Args:
        x: the input.
        activation: how it is rounded.
        scale: one number, of a static input and of nvfp4.
        kept: int64, columns that stay as they are; looked at only with a threshold.
    """
    x = x.float()
    if activation.threshold is None:
        return _quantized(x, activation, scale)
    outliers = (x.abs() > activation.threshold).any(0)
    if kept is not None:
        outliers[kept] = True
    rest = _quantized(x.masked_fill(outliers, 0), activation, scale)
    return torch.where(outliers, x, rest)


def _quantized(x: Tensor, activation: Activation, scale: Tensor | None) -> Tensor:
    granularity, groups = activation.granularity, x
    if granularity.startswith("g"):
        size = int(granularity[1:])
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % size))  # the last run may be shorter
        groups = padded.view(len(x), -1, size)
    return _levels(groups, activation, scale).view(len(x), -1)[:, : x.shape[1]]


def _levels(groups: Tensor, activation: Activation, scale: Tensor | None) -> Tensor:
    """Round ``[rows, ..., n]``, with one range along the last dimension, or for all."""
    grid, granularity = activation.grid, activation.granularity
    peak = groups.abs().amax() if granularity == "tensor" else groups.abs().amax(-1, keepdim=True)
    if grid == "nvfp4":
        assert scale is not None
        return _nvfp4(groups, peak, scale)
    if grid in {"mxfp4", "mxfp8"}:
        return _microscaled(groups, peak, grid)
    limit = 127.0 if grid == "int8" else largest(grid)
    if not activation.dynamic:
        assert scale is not None
        step = scale.float().view(1, 1)
    else:
        step = peak.clamp(min=TINY) / limit
    scaled = groups / step
    if grid == "int8":
        return scaled.round_().clamp_(-128, 127) * step
    return cast(scaled, grid).float() * step


def _nvfp4(groups: Tensor, peak: Tensor, scale: Tensor) -> Tensor:
    scale = scale.float().view(1, 1, 1)
    step = nearest_scales(peak / E2M1_LARGEST / scale).float() * scale
    return nearest_e2m1(groups / step) * step


def _microscaled(groups: Tensor, peak: Tensor, grid: str) -> Tensor:
    step = power_of_two(e8m0_exponents(peak, grid))
    scaled = groups / step
    return (nearest_e2m1(scaled) if grid == "mxfp4" else cast(scaled, "fp8_e4m3").float()) * step
