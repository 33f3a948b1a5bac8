"""Inputs of linear layers, rounded as an engine would: what quantized activations cost in quality.

    x_q = clamp(round(x / s), low, high) * s

with ``s`` per token, per run of channels of a token, or one for the tensor that calibration found.
The microscaling grids have their own levels and steps: a power of two for each run of 32 channels, or
of nvfp4 an 8-bit scale for each run of 16 under the one that calibration found. Columns beyond the
threshold of LLM.int8() (arXiv 2208.07339) pass unrounded. Where a kernel multiplies 8-bit codes itself
(`quantforge_kernels.scaled`), nothing of this happens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantforge.errors import RefusedError
from quantforge.packers import fp4
from quantforge.packers.fp8 import cast
from quantforge.scheme import MICROSCALED, Activation

_LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_BLOCKS = frozenset({"mxfp4", *MICROSCALED})
_SMALLEST = 1e-12


class RoundedInput(nn.Module):
    """A dense linear layer whose input is rounded first: of a weight that no kernel multiplies as codes.

    Args:
        linear: the layer.
        activation: how its input is rounded.
        scale: ``[1, 1]`` of a static range.

    Raises:
        RefusedError: as `check`.
    """

    def __init__(self, linear: nn.Module, activation: Activation, scale: Tensor | None) -> None:
        super().__init__()
        check(activation)
        self.linear = linear
        self._activation = activation
        self._scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x`` ``[..., in_features]``."""
        rows = rounded(x.reshape(-1, x.shape[-1]), self._activation, self._scale)
        y: Tensor = self.linear(rows.view(x.shape))
        return y


def check(activation: Activation) -> None:
    """Refuse inputs that are not simulated.

    Raises:
        RefusedError: naming the grid.
    """
    known = _LARGEST.keys() | _BLOCKS
    if activation.grid not in known:
        raise RefusedError(
            f"inputs quantized to {activation} are not computed here",
            f"known: {', '.join(sorted(known))}; export the weights alone, or evaluate in an engine",
        )


def rounded(x: Tensor, activation: Activation, scale: Tensor | None) -> Tensor:
    """Round ``x`` ``[rows, in]``; ``scale`` ``[1, 1]`` is that of a static range."""
    if activation.threshold is not None:
        outliers = (x.abs() > activation.threshold).any(0)
        inside = _rounded(x.masked_fill(outliers, 0), activation, scale)
        return torch.where(outliers, x, inside)
    return _rounded(x, activation, scale)


def _rounded(x: Tensor, activation: Activation, scale: Tensor | None) -> Tensor:
    values = x.float()
    if activation.granularity.startswith("g"):
        size = int(activation.granularity[1:])
        padded = nn.functional.pad(values, (0, -x.shape[1] % size))  # the last run may be shorter
        values = padded.reshape(len(x), -1, size)
    if activation.grid in _BLOCKS:
        levels = _in_blocks(values, activation.grid, scale)
    else:
        levels = _on_scale(values, activation, scale)
    return levels.view(len(x), -1)[:, : x.shape[1]].to(x.dtype)


def _on_scale(values: Tensor, activation: Activation, scale: Tensor | None) -> Tensor:
    """Round ``[rows, ..., n]``, with one scale along the last dimension, or for all."""
    most = _LARGEST[activation.grid]
    if scale is None:
        largest = values.abs()
        over = (
            largest.amax(-1, keepdim=True) if activation.granularity != "tensor" else largest.amax()
        )
        scale = (over / most).clamp(min=_SMALLEST)
    codes = (values / scale.float()).clamp(-most, most)
    dtype = _DTYPES.get(activation.grid)
    codes = codes.round() if dtype is None else codes.to(dtype).float()
    return codes * scale.float()


def _in_blocks(values: Tensor, grid: str, scale: Tensor | None) -> Tensor:
    """Round ``[rows, groups, n]`` to a microscaling grid; ``scale`` as of `rounded`, of nvfp4 only."""
    peaks = values.abs().amax(-1)
    if scale is not None:
        steps = fp4.nearest_scales(peaks / fp4.E2M1_LARGEST / scale).float() * scale
    else:
        steps = fp4.power_of_two(fp4.e8m0_exponents(peaks, grid))
    scaled = values / steps.unsqueeze(-1)
    levels = cast(scaled, "fp8_e4m3").float() if grid == "mxfp8" else fp4.nearest_e2m1(scaled)
    return levels * steps.unsqueeze(-1)
