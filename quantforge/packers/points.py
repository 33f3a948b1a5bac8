"""Points: the values that columns can take, in the one form that rounders have fast loops for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Points(NamedTuple):
    """The grid of some columns: ``(code - zero) * scale + offset`` with codes inside of ``limits``.

    With a ``table`` (thresholds, then the values between them and the codes of these, float32) it is
    ``value * scale + offset``; a value at a threshold belongs above it.
    """

    scales: Tensor  # float32 [columns, rows], as the two that follow
    zeros: Tensor
    offsets: Tensor
    limits: tuple[int, int]
    dtype: torch.dtype  # of the codes
    table: tuple[Tensor, Tensor, Tensor] | None = None
