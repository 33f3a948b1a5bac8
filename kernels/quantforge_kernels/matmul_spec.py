"""Specification of a matrix product with quantized weights, and the interface of kernels.

One linear layer with quantized weights computes ``y = x W^T``, where

    W[n, k] = value(codes[n, k]) * scale - minimum        scale and minimum of the group of (n, k)

The grid defines ``value``: ``code - zero`` (``int``; the zero is ``2^(bits-1)`` if the grid is
symmetric and 0 if it has minima), ``table[code]`` (``table``: a codebook of 16 values), or the
number with the code as its bits (``fp8``: float8_e4m3fn, ``e5m2``: float8_e5m2). ``scale`` is a parameter per group,
``scales``, multiplied by ``d`` per superblock if there are two levels; ``minimum``, if there is one, is
``mins`` multiplied by ``dmin`` in the same way. These cases cover what files contain: GPTQ and AWQ, NF4 and NVFP4,
fp8 in tiles, and GGML's types of 4, 5, 8 bits, its K-quants and its ternary ones.

A `MatmulSpec` contains everything on which the choice of a kernel may depend; every kernel multiplies any
number of rows of activations. A `Kernel` says which specifications it accepts, lays out the weights once, at load
(``prepare``), and then multiplies from its own layout (``matmul``). This package handles plain tensors only; it knows
nothing about files, schemes or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

PackedWeight = Mapping[str, Tensor]
QuantParams = Mapping[str, Tensor]
GRIDS = ("int", "table", "fp8", "e5m2")
LOWER_SCALE_ENCODINGS = ("", "pairs", "e4m3")
LOWER_LEVEL_PARAMS = frozenset({"scales", "mins"})


@dataclass(frozen=True, slots=True)
class MatmulSpec:
    """Specification of one matrix product with quantized weights.

    Attributes:
        out_features: rows of the weight.
        in_features: columns of the weight.
        bits: bits of one code, 1 to 8.
        group_size: columns that share a scale; ``in_features`` if a row has one scale.
        symmetric: there are neither zeros nor minima; an integer code ``2^(bits-1)`` stands for 0.
        dtype: type of activations and results.
        device: device of the weights: ``cpu``, ``cuda`` or ``cuda:N``; GPUs of one machine may be of several kinds.
        grid: one of `GRIDS`.
        tile_rows: rows that share a scale (fp8 in tiles; 1 otherwise).
        activation_kind: ``fp8`` or ``int8`` if each row of ``x`` is quantized with its own scale, else ``""``.
        has_minima: groups have minima instead of zeros.
        superblock_size: columns that share the upper level of scales (and minima); 0 for one level.
        lower_encoding: how kernels store the lower of two levels, one of `LOWER_SCALE_ENCODINGS`: unchanged; two
            integers below 16 in a byte; or the bytes of float8_e4m3fn.
        input_bits: bits of the integers to which a kernel may round activations, in blocks of at most 64 columns with
            their own scale: 16, which loses nothing that bfloat16 can represent, or 8.
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
    activation_kind: str = ""
    has_minima: bool = False
    superblock_size: int = 0
    lower_encoding: str = ""
    input_bits: int = 16

    @property
    def on_gpu(self) -> bool:
        """Return whether the weights are on a GPU."""
        return torch.device(self.device).type == "cuda"

    @property
    def groups_per_row(self) -> int:
        """Return the number of groups in one row of the weight; in fp8 tiles the last one may be shorter."""
        return -(-self.in_features // self.group_size)


@dataclass(frozen=True, slots=True)
class Kernel:
    """An implementation of products with packed weights, as plain functions.

    Attributes:
        name: as shown in reports.
        accepts: whether the kernel supports a specification on this machine and is meant for it.
        prepare: ``(codes, parameters, spec) -> packed``, called once at load. ``codes`` is uint8
            ``[out, in]`` in ``[0, 2^bits - 1]``. ``parameters``: ``scales`` (floating point, or integers
            if there is ``d``; see `encode_lower_scales`), ``zeros`` (uint8) or ``mins``, all
            ``[ceil(out / tile_rows), groups]``; ``d`` and ``dmin`` ``[out, in / superblock_size]``; ``table`` float32
            ``[16]``.
        matmul: ``(x [rows, in], packed, spec) -> y [rows, out]``, in the type of ``x``.
        row_alignment: packed weights whose row counts are multiples of this number can be concatenated.
    """

    name: str
    accepts: Callable[[MatmulSpec], bool]
    prepare: Callable[[Tensor, QuantParams, MatmulSpec], PackedWeight]
    matmul: Callable[[Tensor, PackedWeight, MatmulSpec], Tensor]
    row_alignment: int = 1


def encode_lower_scales(parameters: QuantParams, spec: MatmulSpec) -> dict[str, Tensor]:
    """Encode the lower of two levels of scales and minima as compactly as files do (`MatmulSpec.lower_encoding`)."""
    return {
        name: _encode_values(value, spec.lower_encoding) if name in LOWER_LEVEL_PARAMS else value
        for name, value in parameters.items()
    }


def decode_lower_scales(parameters: QuantParams, spec: MatmulSpec) -> dict[str, Tensor]:
    """Undo `encode_lower_scales`."""
    return {
        name: decode_values(value, spec.lower_encoding) if name in LOWER_LEVEL_PARAMS else value
        for name, value in parameters.items()
    }


def _encode_values(values: Tensor, kind: str) -> Tensor:
    if kind == "pairs":  # the first of two groups in the low bits
        return values[:, ::2] | (values[:, 1::2] << 4)
    return values.view(torch.uint8) if kind == "e4m3" else values


def decode_values(values: Tensor, kind: str) -> Tensor:
    """Decode a lower level of scales or minima to ``[rows, groups]``."""
    if kind == "pairs":
        return torch.stack((values & 15, values >> 4), 2).flatten(1, 2)
    return values.view(torch.float8_e4m3fn) if kind == "e4m3" else values


@cache
def has_triton() -> bool:
    """Return whether Triton is installed, which compiles the GPU kernels."""
    return find_spec("triton") is not None


def next_power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below ``size``."""
    return 1 << (size - 1).bit_length()


def supports_float8(device: torch.device) -> bool:
    """Return whether Triton supports float8 on a device: compute capability 8.9 and later, and the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
