"""The number types of ggml, as GGUF files hold them: blocks of 32 or 256 weights with fixed layouts.

In all of them a weight is ``step * v(code) + offset`` in float32, with one step (and offset) for a group of 16, 32 or
256 columns:

- *legacy* types (``q4_0`` .. ``q8_0``): ``v(code) = code``; the step is a float16 ``scales``, the offset a float16
  ``mins``.
- *K-quants* (``q2_k`` .. ``q6_k``): a block of 256 has float16 ``d`` (and ``dmin``), and each of its groups an integer
  ``scales`` (and ``mins``) of 4 to 8 bits: ``step = d * scales``, ``offset = -dmin * mins``.
- *IQ4* (``iq4_nl``, ``iq4_xs``): ``v`` is a table of 16 values, denser around 0.
- ``tq1_0``, ``tq2_0``: codes -1, 0, 1. ``mxfp4``: the table of the 4-bit float e2m1, and a step that is a power of two.

The docstrings of this folder call ``d`` and ``dmin`` the units of a block.

This module holds the table of types and imports no torch. `packer` fits, encodes and decodes, `blocks` converts codes
and parameters to bytes and decodes every type of GGUF, `reference` chooses codes as ggml does.

In this folder:

    blocks           Pack codes and parameters into the bytes of ggml's blocks, and unpack them
    grid             Values that the codes of each type stand for: ``step * v(code) + offset``
    packer           Fit, encode and decode ggml's block types: the `Packer` functions, and whole rows by `encode_rows`
    reference        Quantize rows as ggml's own quantizers do, to the last bit, with and without an importance matrix
    reference_loops  ggml's searches for the scale of one group, in loops compiled by numba
    refit            Fit the parameters of ggml's types again for fixed codes, restricted to what can be stored
    row_loops        Loops over rows, compiled by numba: types that need no search, codes for given steps, and nibbles
    search           Search scales that minimize ``sum w (x - q)^2``, with ``w = importance * sqrt(x^2 + mean x^2)``
    search_loops     Loops of `search`, compiled by numba, each at its first call in a process
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantforge.grids import GGML_BLOCKS


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A tensor type of GGUF files: plain numbers, or blocks of quantized ones.

    Attributes:
        number: id of the type in the tensor table.
        columns: weights per block.
        block_bytes: bytes per block.
        grid: name of the scheme for this type; None if QuantForge only reads it.
    """

    number: int
    columns: int
    block_bytes: int
    grid: str | None = None

    def row_bytes(self, in_features: int) -> int:
        """Return the bytes of a row; raise `ValueError` if ``in_features`` is not a multiple of the block."""
        if in_features % self.columns:
            raise ValueError(f"{in_features} columns are not a multiple of {self.columns}")
        return in_features // self.columns * self.block_bytes


# The types by their ggml names.
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
