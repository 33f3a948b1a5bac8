"""What a kernel is asked to do, and what a kernel is.

One linear layer with quantized weights computes

    y[m, n] = sum_k x[m, k] * (codes[n, k] - zeros[n, k // group_size]) * scales[n, k // group_size]

A `Problem` says everything on which the choice of a kernel may depend. A `Kernel` says which
problems it solves, re-lays the weights once, at load (``prepare``), and then multiplies from its
own layout (``matmul``). This package speaks plain tensors only, and knows nothing of files,
schemes or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Packed = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Problem:
    """One matrix product with quantized weights.

    Attributes:
        rows: rows of the activation that speed is wanted for (1 is decoding one sequence). A hint:
            every kernel multiplies any number of rows.
        out_features: rows of the weight.
        in_features: columns of the weight.
        bits: bits of one code, 1 to 8.
        group_size: columns that share a scale; ``in_features`` when a row has one scale.
        symmetric: there are no zeros; the code ``2^(bits-1)`` stands for 0.
        dtype: of activations and results.
        device: type of the device, ``cpu`` or ``cuda``.
    """

    rows: int
    out_features: int
    in_features: int
    bits: int
    group_size: int
    symmetric: bool
    dtype: torch.dtype
    device: str

    @property
    def groups(self) -> int:
        """Groups in one row of the weight."""
        return self.in_features // self.group_size


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to multiply with packed weights, as plain functions.

    Attributes:
        name: as shown in reports.
        accepts: whether the kernel solves a problem on this machine, and is meant for it.
        prepare: ``(codes, scales, zeros, problem) -> packed``, once at load. ``codes`` uint8
            ``[out, in]`` in ``[0, 2^bits - 1]``; ``scales`` floating and ``zeros`` uint8 (None
            when symmetric), both ``[out, groups]``.
        matmul: ``(x [rows, in], packed, problem) -> y [rows, out]``, in the type of ``x``.
    """

    name: str
    accepts: Callable[[Problem], bool]
    prepare: Callable[[Tensor, Tensor, Tensor | None, Problem], Packed]
    matmul: Callable[[Tensor, Packed, Problem], Tensor]
