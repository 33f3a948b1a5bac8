"""Schemes: how the numbers of one tensor are stored, as data and in bits.

A scheme is a grid of numbers, the granularity of its scales, a kind of zero point and the type of the scales; where the
last is left open, it is that of the format that the tensor is written to. A grid whose layout another program fixes
(ggml's), or that has one granularity and one type of scales (e2m1 or e4m3 elements under scales of 8 bits), has no
other fields. `grids` has them all; `notation` is how a person types them. Zeros in a pattern are a `Sparsity`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from quantforge.grids import (
    GRIDS,
    NESTED,
    SCALE_BITS,
    GgmlBlock,
    Granularity,
    PerGroup,
    PerTensor,
    ScaleType,
    Tile,
    Zero,
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Form in which one weight matrix ``[out_features, in_features]`` is stored."""

    grid: str
    granularity: Granularity
    zero: Zero = Zero.NONE
    scale: ScaleType | None = None

    def __str__(self) -> str:
        if not GRIDS[self.grid].free:
            return self.grid
        fields = [self.grid, str(self.granularity), self.zero.value]
        return ":".join(fields if self.scale is None else [*fields, self.scale.value])

    @property
    def bits(self) -> int:
        """Return the bits of one code."""
        return GRIDS[self.grid].bits

    @property
    def weight_bits(self) -> int:
        """Return the bits of one code for each weight it stands for, rounded."""
        return max(1, round(self.bits / GRIDS[self.grid].weights_per_code))

    @property
    def block(self) -> GgmlBlock | None:
        """Return the fixed layout, of a grid that has one."""
        return GRIDS[self.grid].block

    @property
    def symmetric(self) -> bool:
        """Return whether the grid has no zero point."""
        return self.zero is Zero.NONE

    @property
    def integer(self) -> bool:
        """Return whether values are ``scale * (code - zero)`` with plain parameters and integer codes."""
        return self.grid.startswith("int")

    @property
    def in_powers(self) -> bool:
        """Return whether all scales are powers of two."""
        return (self.scale if self.block is None else self.block.scale) is ScaleType.E8M0

    @property
    def scaled(self) -> bool:
        """Return whether each row has scales of its own that may be learned: of integers, or of a type of blocks."""
        if self.block is not None or self.divided:
            return not self.in_powers
        return self.integer and not isinstance(self.granularity, PerTensor)

    @property
    def table(self) -> tuple[int, ...]:
        """Return what each code stands for, of a grid whose codes pick values of a table, in any unit; () of others."""
        if self.block is None:
            return GRIDS[self.grid].table
        return self.block.codes[2] if len(self.block.codes) == 3 else ()

    @property
    def whole(self) -> bool:
        """Return whether rows share parameters, so that a matrix can only be rounded as one."""
        shared = isinstance(self.granularity, PerTensor | Tile)
        return shared or self.scale in {ScaleType.E4M3, ScaleType.DOUBLE}

    @property
    def divided(self) -> bool:
        """Return whether all that rows share is one number, under which each has scales of its own."""
        return self.scale is ScaleType.E4M3

    @property
    def joint(self) -> bool:
        """Return whether matrices that engines join have to share a parameter, so that they are rounded together."""
        one_scale = isinstance(self.granularity, PerTensor) and not self.integer
        return one_scale or self.divided

    def group_size(self, in_features: int) -> int:
        """Return the number of input columns that share one scale (``in_features`` per row and per tensor)."""
        if isinstance(self.granularity, Tile):
            return self.granularity.columns
        return self.granularity.size if isinstance(self.granularity, PerGroup) else in_features

    def groups(self, in_features: int) -> int:
        """Return the number of scales along one row; raise `ValueError` when the group size (or block) does not fit.

        The last tile of a row may be narrower: files have such, and no format here writes them.
        """
        size = self.group_size(in_features)
        if isinstance(self.granularity, Tile):
            return -(-in_features // size)
        whole = size if self.block is None else self.block.columns
        whole = math.lcm(whole, GRIDS[self.grid].weights_per_code)
        if in_features % whole:
            what = "group size" if self.block is None else f"{self.grid} block"
            raise ValueError(f"{in_features} columns are not a multiple of the {what} {whole}")
        return in_features // size

    def parameter_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of scales and zeros for a weight of ``shape`` (out, in)."""
        if isinstance(self.granularity, PerTensor):
            return (1, 1)
        if isinstance(self.granularity, Tile):
            return (-(-shape[0] // self.granularity.rows), self.groups(shape[1]))
        return (shape[0], self.groups(shape[1]))

    def bits_per_weight(self, shape: tuple[int, int]) -> Fraction:
        """Return the exact information bits per weight: codes, scales and zero points, without any padding.

        Of a fixed layout: all bits of its blocks.
        """
        if self.block is not None:
            return Fraction(8 * self.block.block_bytes, self.block.columns)
        scale_bits = SCALE_BITS[self.scale or ScaleType.F16]
        scale_bits += {Zero.NONE: 0, Zero.INT: self.bits, Zero.MIN: scale_bits}[self.zero]
        scales = math.prod(self.parameter_shape(shape))
        above = {ScaleType.E4M3: 32, ScaleType.DOUBLE: 32 * (1 + -(-scales // NESTED))}
        extra = above.get(self.scale, 0) if self.scale else 0
        codes = Fraction(self.bits, GRIDS[self.grid].weights_per_code)
        return codes + Fraction(scale_bits * scales + extra, math.prod(shape))

    def with_scale(self, scale: ScaleType) -> Scheme:
        """Return this scheme with its scale type filled in where it was left open."""
        if self.scale is not None:
            return self
        return replace(self, scale=GRIDS[self.grid].scale or scale)


@dataclass(frozen=True, slots=True)
class Activation:
    """Rounding of the input of a linear layer at run time.

    Attributes:
        grid: as of a `Scheme`.
        granularity: ``token``, ``tensor``, or runs of channels of a token: ``g128``.
        dynamic: the range is that of the values at hand; else calibration measured it (of ``nvfp4`` that of the
            whole tensor, under which the groups find their own).
        threshold: columns with a larger magnitude are left in 16 bits (LLM.int8(), arXiv 2208.07339); None: none.
        kept: most columns whose weights are kept in 16 bits too, because calibration saw them beyond the threshold.
    """

    grid: str
    granularity: str
    dynamic: bool = True
    threshold: float | None = None
    kept: int = 0

    @property
    def measured(self) -> bool:
        """Return whether calibration measures it: its range, or the columns that are kept in 16 bits."""
        return not self.dynamic or self.kept > 0

    def __str__(self) -> str:
        text = f"{self.grid}:{self.granularity}:{'dynamic' if self.dynamic else 'static'}"
        text = text if self.threshold is None else f"{text}:{self.threshold:g}"
        return f"{text}:{self.kept}" if self.kept else text


@dataclass(frozen=True, slots=True)
class LayerScheme:
    """The scheme of a linear layer: its weight, and its input when that is quantized too."""

    weight: Scheme
    input: Activation | None = None

    def __str__(self) -> str:
        return str(self.weight) if self.input is None else f"{self.weight}+{self.input}"


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Zeros of every row of a weight.

    Attributes:
        share: of the columns of each row that is zero; their number is rounded down.
        stay: how many of every ``run`` neighbouring columns are not zero; 0 where zeros may lie anywhere in a row.
        run: neighbouring columns of a pattern; 1 without one.
    """

    share: float
    stay: int = 0
    run: int = 1

    def __str__(self) -> str:
        return f"{self.stay}:{self.run}" if self.stay else f"{self.share:.6g}"

    def zeros(self, columns: int) -> int:
        """Return how many of the first ``columns`` columns of a row become zero."""
        if self.stay:
            return columns // self.run * (self.run - self.stay)
        return int(self.share * columns + 1e-9)

    def fits(self, columns: int) -> bool:
        """Return whether rows of so many columns can have the pattern."""
        return columns % self.run == 0
