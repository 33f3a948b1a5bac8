"""Inputs of linear layers, rounded as an engine would: what quantized activations cost in quality.

    x_q = clamp(round(x / s), low, high) * s

with ``s`` per token, per run of channels of a token, or one for the tensor that calibration found.
Columns beyond the threshold of LLM.int8() (arXiv 2208.07339) pass unrounded. Where a kernel
multiplies 8-bit codes itself (`quantforge_kernels.scaled`), nothing of this happens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.errors import RefusedError
from quantforge.scheme import Activation

_LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_SMALLEST = 1e-12


def check(activation: Activation) -> None:
    """Refuse inputs that are not simulated.

    Raises:
        RefusedError: naming the grid.
    """
    if activation.grid not in _LARGEST:
        raise RefusedError(
            f"inputs quantized to {activation} are not computed here",
            f"known: {', '.join(_LARGEST)}; export the weights alone, or evaluate in an engine",
        )


def rounded(x: Tensor, activation: Activation, scale: Tensor | None) -> Tensor:
    """Round ``x`` ``[rows, in]``; ``scale`` ``[1, 1]`` is that of a static range."""
    if activation.threshold is not None:
        outliers = (x.abs() > activation.threshold).any(0)
        inside = _rounded(x.masked_fill(outliers, 0), activation, scale)
        return torch.where(outliers, x, inside)
    return _rounded(x, activation, scale)


def _rounded(x: Tensor, activation: Activation, scale: Tensor | None) -> Tensor:
    most = _LARGEST[activation.grid]
    values = x.float()
    if activation.granularity.startswith("g"):
        values = values.reshape(len(x), -1, int(activation.granularity[1:]))
    if scale is None:
        largest = values.abs()
        over = (
            largest.amax(-1, keepdim=True) if activation.granularity != "tensor" else largest.amax()
        )
        scale = (over / most).clamp(min=_SMALLEST)
    codes = (values / scale.float()).clamp(-most, most)
    dtype = _DTYPES.get(activation.grid)
    codes = codes.round() if dtype is None else codes.to(dtype).float()
    return (codes * scale.float()).view(x.shape).to(x.dtype)
