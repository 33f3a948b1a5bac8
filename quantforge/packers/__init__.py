"""Packers: one module per number family, each with plain functions ``fit``, ``encode``, ``decode``.

``fit`` chooses the parameters of a weight (as stored), ``encode`` turns any run of columns into codes, ``decode``
turns codes back. Rounders call only these three, so that one GPTQ works on every grid. `bits` lays codes out in
the words of a file.

In this folder:

    bits             A dense little-endian bit stream: how integer codes lie in the 32-bit words of a file
    codebook_search  Scales of groups on any grid of fixed levels that minimise the weighted squared error
    fp4              nvfp4 and mxfp8: elements of 4 or 8 bits under block scales of 8 bits
    fp8              8-bit floating point: e4m3 (without infinities) and e5m2, under a scale per tensor, row
    input_rounding   Inputs of linear layers, rounded at run time: what an engine does to them
    integer          Uniform integer grids, 2 to 8 bits, symmetric or with an integer zero point
    levels           Nearest of a few sorted levels for each of many values: thresholds are counted, levels looked up
    minima           Uniform integer grids with a stored minimum: ``code * scale + minimum``, as MLX has them
    nf4              The 4-bit codebooks of bitsandbytes: NF4 and FP4, in groups that share one absolute maximum
    row_codes        Codes of whole matrices on a CPU, in one pass: the loops of `nf4`, `fp8` and `integer`
    scale_loops      The scale search of `scale_search` in loops that numba compiles, for large matrices on a CPU
    scale_search     Scales that minimise the weighted squared error of a group instead of covering its range
    tensor           The one thing that every method makes and every format stores: a quantized tensor
    ggml/            The number types of ggml, as GGUF files hold them: blocks of 32 or 256 weights with fixed layouts
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from quantforge.grids import GRIDS, Zero
from quantforge.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor, Statement


class Packer(Protocol):
    """Interface of the module of a number family."""

    def fit(
        self,
        weight: Tensor,
        scheme: Scheme,
        importance: Tensor | None = None,
        *,
        search: bool = False,
    ) -> dict[str, Tensor]:
        """Choose the parameters of ``weight`` ``[out, in]`` (float32), rounded to their stored types.

        ``importance`` ``[in]`` weights the columns of the search (the diagonal of the Hessian).
        """

    def encode(
        self,
        weight: Tensor,
        parameters: Mapping[str, Tensor],
        scheme: Scheme,
        columns: slice | None = None,
    ) -> Tensor:
        """Return the nearest codes of ``weight`` ``[out, n]``, the run ``columns`` of the whole matrix.

        ``parameters`` are those of the whole matrix; ``columns`` says which of its groups apply.
        """

    def decode(
        self,
        codes: Tensor,
        parameters: Mapping[str, Tensor],
        scheme: Scheme,
        columns: slice | None = None,
    ) -> Tensor:
        """Return float32 values of ``codes`` ``[out, n]``, the run ``columns`` of the whole matrix."""

    def stated(self, tensor: QuantizedTensor) -> Statement:
        """State a tensor, without what belongs to its input, in the terms of the kernels."""


def packer_of(scheme: Scheme) -> Packer:
    """Return the packer of the scheme's grid."""
    grid = GRIDS[scheme.grid]
    free = grid.minimum and scheme.zero is Zero.MIN
    return cast("Packer", import_module(grid.minimum if free else grid.packer))
