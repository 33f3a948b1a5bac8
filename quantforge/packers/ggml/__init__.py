"""The number types of ggml, as GGUF files hold them: blocks of 32 or 256 weights with fixed layouts.

In all of them a weight is ``step * v(code) + offset`` in float32, with one step (and offset) for a group of 16, 32 or
256 columns:

- *legacy* types (``q4_0`` .. ``q8_0``): ``v(code) = code``; the step is a float16 ``scales``, the offset a float16
  ``mins``.
- *K-quants* (``q2_k`` .. ``q6_k``): a block of 256 has float16 ``d`` (and ``dmin``), and each of its groups an integer
  ``scales`` (and ``mins``) of 4 to 8 bits: ``step = d * scales``, ``offset = -dmin * mins``.
- *IQ4* (``iq4_nl``, ``iq4_xs``): ``v`` is a table of 16 values, denser around 0.
- ``tq1_0``, ``tq2_0``: codes -1, 0, 1. ``mxfp4``: the table of the 4-bit float e2m1, a step that is a power of two.

This module holds the table of types and imports no torch; `packer` fits, encodes and decodes, `blocks` lays codes and
parameters out in bytes and reads every type there is, `reference` chooses codes as ggml does.

In this folder:

    blocks           Codes and parameters as the bytes of ggml's blocks, and back; float32 weights from any of them
    grid             Values that the codes of each type stand for: ``step * v(code) + offset``
    packer           The grids of ggml for rounders: ``fit``, ``encode``, ``decode``; whole rows by `encode_rows`
    reference        Rows quantized as ggml's own quantizers do, to the last bit, with and without an importance matrix
    reference_loops  ggml's searches for the scale of one group, in loops that numba compiles
    refit            Parameters of ggml's grids fitted again with the codes held, restricted to what can be stored
    row_loops        Loops over rows, compiled by numba: types that need no search, codes for chosen steps, and nibbles
    search           Scales that minimise ``sum w (x - q)^2`` of every block, ``w = importance * sqrt(x^2 + mean x^2)``
    search_loops     Loops of `search`, compiled by numba, each at its first call in a process
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantforge.grids import GGML_BLOCKS


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A type of tensors in GGUF files: plain numbers, or blocks of them.

    Attributes:
        number: its id in the tensor table.
        columns: weights of a block.
        block_bytes: bytes of a block.
        grid: the scheme that has these numbers; None of a type that we only read.
    """

    number: int
    columns: int
    block_bytes: int
    grid: str | None = None

    def row_bytes(self, in_features: int) -> int:
        """Return the bytes of a row; raise `ValueError` when blocks do not fill it."""
        if in_features % self.columns:
            raise ValueError(f"{in_features} columns are not a multiple of {self.columns}")
        return in_features // self.columns * self.block_bytes


# By ggml's name of the type.
GGML_TYPES: Mapping[str, GgmlType] = {
    "F32": GgmlType(0, 1, 4),
    "F16": GgmlType(1, 1, 2),
    "BF16": GgmlType(30, 1, 2),
    **{
        grid.upper(): GgmlType(block.number, block.columns, block.block_bytes, grid)
        for grid, block in GGML_BLOCKS.items()
    },
    "NVFP4": GgmlType(40, 64, 36),
}
