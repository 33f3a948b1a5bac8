"""Inputs of linear layers, rounded at run time as an engine does, and their static scales.

A dynamic input has a scale per token, per group of its channels or per tensor, computed at run time: ``absmax / 127``
for int8, ``absmax / 448`` for e4m3, a power of two for the mx grids. A static input has a single scale, which an
observer chose during calibration from a histogram of magnitudes: ``absmax`` covers all values, ``percentile`` all but 1
in 10,000, ``mse`` minimizes the squared error. The static scale of nvfp4 covers all values whatever the observer is,
since each group of 16 has an e4m3 scale of its own in addition, computed at run time.

With a ``threshold`` the columns in which any value is larger are not rounded (LLM.int8(), arXiv 2208.07339), nor are
those that calibration chose to keep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.packers.fp4 import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e8m0,
    e8m0_exponents,
    round_scales_to_e4m3,
    round_to_e2m1,
)
from quantforge.packers.fp8 import max_value, round_to_float8
from quantforge.scheme import Activation

HISTOGRAM_BINS = 1 << 15  # of magnitudes: sign, exponent and 7 bits of mantissa make 16 bits
PERCENTILE_SHARE = 0.9999
MSE_RANGE_FRACTIONS = tuple(1.0 - 0.02 * step for step in range(40))
MIN_ABSMAX = 1e-12


def magnitude_histogram(x: Tensor) -> Tensor:
    """Count values by the upper 16 bits of their float32 magnitude, int64 ``[HISTOGRAM_BINS]``.

    The order of the tokens makes no difference.
    """
    bits = x.detach().abs().float().contiguous().view(torch.int32) >> 16
    return torch.bincount(bits.flatten(), minlength=HISTOGRAM_BINS)


def max_input(grid: str) -> float:
    """Return the largest magnitude of an input that a static scale of 1 can represent."""
    if grid == "nvfp4":
        return E4M3_MAX * E2M1_MAX
    return 127.0 if grid == "int8" else max_value(grid)


def choose_static_scale(
    activation: Activation, histogram: Tensor, absmax: float, observer: str
) -> float:
    """Return the scale of a static input, which is positive.

    Args:
        activation: how the input is rounded.
        histogram: `magnitude_histogram` of the calibration inputs.
        absmax: the largest magnitude of the calibration inputs.
        observer: ``absmax``, ``percentile`` or ``mse``.
    """
    max_code = max_input(activation.grid)
    if activation.grid == "nvfp4":  # groups find their own range below the largest
        return max(absmax, MIN_ABSMAX) / max_code
    values = (torch.arange(HISTOGRAM_BINS, dtype=torch.int32) << 16).view(torch.float32)
    nonempty = histogram.cpu() > 0
    values, weights = values[nonempty].double(), histogram.cpu()[nonempty].double()
    if observer == "percentile":
        cumulative = weights.cumsum(0)
        absmax = float(values[int((cumulative < PERCENTILE_SHARE * cumulative[-1]).sum())])
    elif observer == "mse":

        def error(fraction: float) -> float:
            error_values = values - _fake_quantize_static(
                values, fraction * absmax / max_code, activation.grid
            )
            return float((weights * error_values**2).sum())

        absmax *= min(MSE_RANGE_FRACTIONS, key=error)
    return max(absmax, MIN_ABSMAX) / max_code


def _fake_quantize_static(values: Tensor, scale: float, grid: str) -> Tensor:
    scaled = values / max(scale, MIN_ABSMAX)
    if grid == "int8":
        return scaled.round().clamp(-128, 127) * scale
    return round_to_float8(scaled.float(), grid).double() * scale


def fake_quantize_input(
    x: Tensor,
    activation: Activation,
    scale: Tensor | None = None,
    unquantized_columns: Tensor | None = None,
) -> Tensor:
    """Return ``x`` ``[tokens, in]`` quantized and dequantized as an engine's kernel does it, in float32.

    Args:
        x: the input.
        activation: how the input is rounded.
        scale: the scale of a static input or the tensor scale of nvfp4, one number.
        unquantized_columns: columns that are not rounded, int64; used only with a threshold.
    """
    x = x.float()
    if activation.threshold is None:
        return _fake_quantize(x, activation, scale)
    outliers = (x.abs() > activation.threshold).any(0)
    if unquantized_columns is not None:
        outliers[unquantized_columns] = True
    quantized = _fake_quantize(x.masked_fill(outliers, 0), activation, scale)
    return torch.where(outliers, x, quantized)


def _fake_quantize(x: Tensor, activation: Activation, scale: Tensor | None) -> Tensor:
    granularity, groups = activation.granularity, x
    if granularity.startswith("g"):
        size = int(granularity[1:])
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % size))  # the last run may be shorter
        groups = padded.view(len(x), -1, size)
    return _fake_quantize_groups(groups, activation, scale).view(len(x), -1)[:, : x.shape[1]]


def _fake_quantize_groups(groups: Tensor, activation: Activation, scale: Tensor | None) -> Tensor:
    """Quantize and dequantize ``[rows, ..., n]``, with one scale along the last dimension, or for the whole tensor."""
    grid, granularity = activation.grid, activation.granularity
    absmax = groups.abs().amax() if granularity == "tensor" else groups.abs().amax(-1, keepdim=True)
    if grid == "nvfp4":
        assert scale is not None
        return _fake_quantize_nvfp4(groups, absmax, scale)
    if grid in {"mxfp4", "mxfp8"}:
        return _fake_quantize_mx(groups, absmax, grid)
    max_code = 127.0 if grid == "int8" else max_value(grid)
    if not activation.dynamic:
        assert scale is not None
        step = scale.float().view(1, 1)
    else:
        step = absmax.clamp(min=MIN_ABSMAX) / max_code
    scaled = groups / step
    if grid == "int8":
        return scaled.round_().clamp_(-128, 127) * step
    return round_to_float8(scaled, grid).float() * step


def _fake_quantize_nvfp4(groups: Tensor, absmax: Tensor, scale: Tensor) -> Tensor:
    scale = scale.float().view(1, 1, 1)
    step = round_scales_to_e4m3(absmax / E2M1_MAX / scale).float() * scale
    return round_to_e2m1(groups / step) * step


def _fake_quantize_mx(groups: Tensor, absmax: Tensor, grid: str) -> Tensor:
    step = decode_e8m0(e8m0_exponents(absmax, grid))
    scaled = groups / step
    return (
        round_to_e2m1(scaled) if grid == "mxfp4" else round_to_float8(scaled, "fp8_e4m3").float()
    ) * step
