"""The inner loops of the search on a CPU, as functions of tensors; see `broadcast` for what they compute."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from quantforge.packers.ggml.grid import CodeRange
from quantforge.packers.ggml.panels import LANES, THRESHOLDS
from quantforge.packers.ggml.trials import Integers, Offset, Trials


def _kernels() -> ModuleType:
    """Import the loops when they are first needed, since numba takes a moment, and compiling some seconds."""
    from quantforge.packers.ggml import kernels

    return kernels


def _panel_loops() -> ModuleType:
    from quantforge.packers.ggml import panel_loops

    return panel_loops


def _block_kernels() -> ModuleType:
    from quantforge.packers.ggml import block_kernels

    return block_kernels


def arrange(rows: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Arrange rows in panels of `LANES` rows, the last one filled up with zeros (as `broadcast.arrange`)."""
    panels = -(-len(rows) // LANES)
    x = torch.empty(panels, rows.shape[1], LANES)
    weights = torch.empty_like(x)
    arrays = (rows.contiguous(), importance.contiguous(), x, weights)
    _kernels().arrange(*(part.numpy() for part in arrays))
    return x, weights


def fit(x: Tensor, weights: Tensor, size: int, grid: CodeRange, trials: Trials) -> Tensor:
    """Find step and offset of groups (as `broadcast.fit`)."""
    found = torch.empty(4, x.shape[0], x.shape[1] // size, x.shape[2])
    starts = numpy.array(trials.starts, numpy.float32)
    kind = (trials.offset is not Offset.NONE, trials.offset is Offset.BELOW_ZERO)
    numbers = (starts, trials.polish, *kind, *thresholds(grid))
    _kernels().fit(x.numpy(), weights.numpy(), *numbers, found.numpy())
    return found


def choose(x: Tensor, weights: Tensor, among: Integers, grid: CodeRange) -> Tensor:
    """Choose step and offset of each group (as `broadcast.choose`)."""
    found = torch.empty(7, *among.start.shape[1:])
    moved = numpy.array((among.limits, *among.moves), numpy.float32)
    arrays = (part.numpy() for part in (x, weights, among.start, among.units))
    _kernels().choose(*arrays, moved, *thresholds(grid), found.numpy())
    return found


def encode(weight: Tensor, step: Tensor, offset: Tensor | None, grid: CodeRange) -> Tensor:
    """Return the nearest codes of ``weight`` ``[rows, columns]`` for steps and offsets ``[rows, groups]``."""
    found = torch.empty(weight.shape, dtype=torch.int8)
    offsets = torch.zeros(0, 0) if offset is None else offset.contiguous()
    arrays = (part.numpy() for part in (weight.contiguous(), step.contiguous(), offsets))
    _panel_loops().encode(*arrays, *_codes(grid), found.numpy())
    return found.view(grid.dtype)


def cover(rows: Tensor, kind: int, grid: CodeRange, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cover the range of each ``size`` columns of ``rows`` ``[rows, columns]``, without a search.

    ``EXTREME`` takes the first value of largest magnitude to the lowest code, ``AFFINE`` the least and greatest values
    to the first and last code, ``MAGNITUDE`` the largest magnitude to the last code and halves away from 0.

    Returns:
        Scales and minima, float32 ``[rows, groups]``, and codes.
    """
    scales = torch.empty(len(rows), rows.shape[1] // size)
    mins, codes = torch.empty_like(scales), torch.empty(rows.shape, dtype=torch.int8)
    limits = numpy.float32(grid.low), numpy.float32(grid.high)
    arrays = (part.numpy() for part in (scales, mins, codes))
    _block_kernels().cover(rows.contiguous().numpy(), kind, *limits, *arrays)
    return scales, mins, codes.view(grid.dtype)


def with_nibbles(heads: Tensor, codes: Tensor) -> Tensor:
    """Join what blocks begin with, ``[blocks, n]`` of 16 bits, and the low four bits of their codes, uint8.

    Of ``codes`` ``[blocks, 32]`` below 16, ``j`` and ``j + 16`` share a byte.
    """
    words = torch.empty(len(codes), heads.shape[1] + 8, dtype=torch.uint16)
    arrays = (heads.contiguous().view(torch.uint16), codes.contiguous().view(torch.uint16), words)
    _block_kernels().join_nibbles(*(part.numpy() for part in arrays))
    return words.view(torch.uint8)


def cover_mxfp4(rows: Tensor, exponents: Tensor, steps: Tensor, middles: Tensor) -> Tensor:
    """Return codes of ``rows`` ``[rows, columns]``: the nearest size of a block of 32, then the sign.

    Args:
        rows: float32.
        exponents: of each block, uint8 ``[rows, blocks]``.
        steps: of each exponent, ``[256]``.
        middles: between the sizes, ``[7]``; a value that is one of them gets the smaller size.
    """
    codes = torch.empty(rows.shape, dtype=torch.uint8)
    arrays = (rows.contiguous(), exponents, steps, middles, codes.view(torch.int8))
    _block_kernels().cover_mxfp4(*(part.numpy() for part in arrays))
    return codes


def thresholds(grid: CodeRange) -> tuple[Any, ...]:
    """Return the least and the greatest value; of a table also the thresholds and the rise of the value at each."""
    if grid.values is None:
        return numpy.float32(grid.low), numpy.float32(grid.high), None, None
    values = numpy.array(sorted(set(grid.values)), numpy.float32)
    middles = numpy.full(THRESHOLDS, numpy.inf, numpy.float32)
    rises = numpy.zeros(THRESHOLDS, numpy.float32)
    middles[: len(values) - 1] = (values[1:] + values[:-1]) / numpy.float32(2)
    rises[: len(values) - 1] = numpy.diff(values)
    return values[0], values[-1], middles, rises


def _codes(grid: CodeRange) -> tuple[Any, ...]:
    """Return `thresholds` with the codes in the place of the values."""
    low, high, middles, rises = thresholds(grid)
    if grid.values is not None:
        first = {value: code for code, value in reversed([*enumerate(grid.values)])}
        codes = numpy.array([first[value] for value in sorted(first)], numpy.float32)
        low = codes[0]
        rises[: len(codes) - 1] = numpy.diff(codes)
    return low, high, middles, rises
