"""Problems and kernels: the product that a kernel is asked for, and the functions that make a kernel.

One linear layer with quantized weights computes ``y = x W^T``, where

    W[n, k] = value(codes[n, k]) * scale - low        scale and low of the group of (n, k)

``value`` is, by grid, ``code - zero`` (``int``; the zero is ``2^(bits-1)`` where the grid is
symmetric and 0 where it has minima), ``table[code]`` (``table``: a codebook of 16 values), or the
number whose byte the code is (``fp8``: float8_e4m3fn, ``e5m2``: float8_e5m2). ``scale`` is a parameter per group,
``scales``, times ``d`` per superblock where there are two levels; ``low``, if there are minima, is
likewise ``mins`` times ``dmin``. These few forms cover what files hold: GPTQ and AWQ, NF4 and NVFP4,
fp8 in tiles, and GGML's types of 4, 5, 8 bits, its K-quants and its ternary ones.

A `Problem` says everything on which the choice of a kernel may depend; every kernel multiplies any
number of rows of activations. A `Kernel` says which
problems it solves, re-lays the weights once, at load (``prepare``), and then
multiplies from its own layout (``matmul``). This package speaks plain tensors only, and knows
nothing of files, schemes or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

Packed = Mapping[str, Tensor]
Parameters = Mapping[str, Tensor]
GRIDS = ("int", "table", "fp8", "e5m2")
LOWER = ("", "pairs", "e4m3")
LOWER_LEVEL = frozenset({"scales", "mins"})


@dataclass(frozen=True, slots=True)
class Problem:
    """One matrix product with quantized weights.

    Attributes:
        out_features: rows of the weight.
        in_features: columns of the weight.
        bits: bits of one code, 1 to 8.
        group_size: columns that share a scale; ``in_features`` when a row has one scale.
        symmetric: there are neither zeros nor minima; an integer code ``2^(bits-1)`` stands for 0.
        dtype: of activations and results.
        device: where the weights are: ``cpu``, ``cuda`` or ``cuda:N``; GPUs of one machine may be of several kinds.
        grid: one of `GRIDS`.
        tile_rows: rows that share a scale (fp8 in tiles; 1 otherwise).
        activation: ``""``, or ``fp8`` or ``int8`` where each row of ``x`` is quantized, too, to a
            scale of its own.
        minima: groups have minima instead of zeros.
        superblock: columns that share the upper level of scales (and minima); 0: there is one level.
        lower: how kernels hold the lower of two levels, one of `LOWER`: as given; two integers below
            16 to a byte; or the bytes of float8_e4m3fn.
        input_bits: bits of the integers to which a kernel may round activations, in blocks of at most 64 columns with
            a scale of their own: 16, which loses nothing that bfloat16 holds, or 8.
    """

    out_features: int
    in_features: int
    bits: int
    group_size: int
    symmetric: bool
    dtype: torch.dtype
    device: str
    grid: str = "int"
    tile_rows: int = 1
    activation: str = ""
    minima: bool = False
    superblock: int = 0
    lower: str = ""
    input_bits: int = 16

    @property
    def on_gpu(self) -> bool:
        """Return whether the weights are on a GPU."""
        return torch.device(self.device).type == "cuda"

    @property
    def groups(self) -> int:
        """Return the groups in one row of the weight; the last one may be cut short in tiles of fp8."""
        return -(-self.in_features // self.group_size)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to multiply with packed weights, as plain functions.

    Attributes:
        name: as shown in reports.
        accepts: whether the kernel solves a problem on this machine, and is meant for it.
        prepare: ``(codes, parameters, problem) -> packed``, once at load. ``codes`` uint8
            ``[out, in]`` in ``[0, 2^bits - 1]``. ``parameters``: ``scales`` (floating, or integers
            below ``d``; see `narrowed`), ``zeros`` (uint8) or ``mins``, all ``[ceil(out / tile_rows), groups]``;
            ``d`` and ``dmin`` ``[out, in / superblock]``; ``table`` float32 ``[16]``.
        matmul: ``(x [rows, in], packed, problem) -> y [rows, out]``, in the type of ``x``.
        rows_apart: packed weights lie one after the other by so many rows; those of a multiple of
            it can be joined to one.
    """

    name: str
    accepts: Callable[[Problem], bool]
    prepare: Callable[[Tensor, Parameters, Problem], Packed]
    matmul: Callable[[Tensor, Packed, Problem], Tensor]
    rows_apart: int = 1


def narrowed(parameters: Parameters, problem: Problem) -> dict[str, Tensor]:
    """Return the parameters as kernels hold them: the lower of two levels no wider than files do (`Problem.lower`)."""
    return {
        name: _narrow(value, problem.lower) if name in LOWER_LEVEL else value
        for name, value in parameters.items()
    }


def widened(parameters: Parameters, problem: Problem) -> dict[str, Tensor]:
    """Undo `narrowed`."""
    return {
        name: wide(value, problem.lower) if name in LOWER_LEVEL else value
        for name, value in parameters.items()
    }


def _narrow(values: Tensor, kind: str) -> Tensor:
    if kind == "pairs":  # the first of two groups in the low bits
        return values[:, ::2] | (values[:, 1::2] << 4)
    return values.view(torch.uint8) if kind == "e4m3" else values


def wide(values: Tensor, kind: str) -> Tensor:
    """Return a lower level ``[rows, groups]`` as it was given."""
    if kind == "pairs":
        return torch.stack((values & 15, values >> 4), 2).flatten(1, 2)
    return values.view(torch.float8_e4m3fn) if kind == "e4m3" else values


@cache
def has_triton() -> bool:
    """Return whether kernels for a GPU can be compiled here."""
    return find_spec("triton") is not None


def power_of_two(size: int) -> int:
    """Return the least power of two that is not below a size."""
    return 1 << (size - 1).bit_length()


def knows_float8(device: torch.device) -> bool:
    """Return whether Triton has float8 on a device: GPUs of compute capability 8.9 and more, and its interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
