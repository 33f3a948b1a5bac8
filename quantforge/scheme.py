"""Schemes: how the numbers of one tensor are stored, as data and in bits per weight.

A scheme consists of a grid of numbers, the granularity of its scales, a kind of zero point and the scale type; a scale
type that is left open is that of the format. Grids whose layout another program fixes (ggml's types), or that have only
one granularity and scale type (e2m1 or e4m3 elements with 8-bit scales), have no other fields. `grids` lists them;
`notation` is how a user types them. Sparsity patterns are a `Sparsity`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from quantforge.grids import (
    DOUBLE_QUANT_GROUP,
    GRIDS,
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
    """How one weight matrix ``[out_features, in_features]`` is stored."""

    grid: str
    granularity: Granularity
    zero: Zero = Zero.NONE
    scale: ScaleType | None = None

    def __str__(self) -> str:
        if not GRIDS[self.grid].has_parameters:
            return self.grid
        fields = [self.grid, str(self.granularity), self.zero.value]
        return ":".join(fields if self.scale is None else [*fields, self.scale.value])

    @property
    def bits(self) -> int:
        """Return the bits of one code."""
        return GRIDS[self.grid].bits

    @property
    def weight_bits(self) -> int:
        """Return the bits of a code per weight that it stands for, rounded."""
        return max(1, round(self.bits / GRIDS[self.grid].weights_per_code))

    @property
    def block(self) -> GgmlBlock | None:
        """Return the block layout of a ggml type, None for other grids."""
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
    def has_power_of_two_scales(self) -> bool:
        """Return whether all scales are powers of two."""
        return (self.scale if self.block is None else self.block.scale) is ScaleType.E8M0

    @property
    def has_learnable_scales(self) -> bool:
        """Return whether each row has scales that tuning can learn: those of integers, or of ggml blocks."""
        if self.block is not None or self.has_global_scale:
            return not self.has_power_of_two_scales
        return self.integer and not isinstance(self.granularity, PerTensor)

    @property
    def code_values(self) -> tuple[int, ...]:
        """Return the value of each code, in any unit, for grids whose codes index a table; () for others."""
        if self.block is None:
            return GRIDS[self.grid].code_values
        return self.block.codes[2] if len(self.block.codes) == 3 else ()

    @property
    def rows_share_parameters(self) -> bool:
        """Return whether rows share parameters, so that a matrix has to be quantized as a whole."""
        shared = isinstance(self.granularity, PerTensor | Tile)
        return shared or self.scale in {ScaleType.E4M3, ScaleType.DOUBLE}

    @property
    def has_global_scale(self) -> bool:
        """Return whether all rows share one scale, in addition to scales of their own."""
        return self.scale is ScaleType.E4M3

    @property
    def is_joint(self) -> bool:
        """Return whether matrices that engines join have to share a parameter, and so are quantized together."""
        one_scale = isinstance(self.granularity, PerTensor) and not self.integer
        return one_scale or self.has_global_scale

    def group_size(self, in_features: int) -> int:
        """Return the number of input columns that share one scale; ``in_features`` for scales per row or tensor."""
        if isinstance(self.granularity, Tile):
            return self.granularity.columns
        return self.granularity.size if isinstance(self.granularity, PerGroup) else in_features

    def groups(self, in_features: int) -> int:
        """Return the number of scales along one row; raise `ValueError` if the group or block size does not divide it.

        The last tile of a row may be narrower: some files have such tiles, but no format writes them here.
        """
        size = self.group_size(in_features)
        if isinstance(self.granularity, Tile):
            return -(-in_features // size)
        group_columns = size if self.block is None else self.block.columns
        group_columns = math.lcm(group_columns, GRIDS[self.grid].weights_per_code)
        if in_features % group_columns:
            unit_name = "group size" if self.block is None else f"{self.grid} block"
            raise ValueError(
                f"{in_features} columns are not a multiple of the {unit_name} {group_columns}"
            )
        return in_features // size

    def parameter_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of scales and zeros for a weight of ``shape`` (out, in)."""
        if isinstance(self.granularity, PerTensor):
            return (1, 1)
        if isinstance(self.granularity, Tile):
            return (-(-shape[0] // self.granularity.rows), self.groups(shape[1]))
        return (shape[0], self.groups(shape[1]))

    def bits_per_weight(self, shape: tuple[int, int]) -> Fraction:
        """Return the exact bits per weight of codes, scales and zero points, without padding.

        For a ggml type these are all bits of its blocks.
        """
        if self.block is not None:
            return Fraction(8 * self.block.block_bytes, self.block.columns)
        scale_bits = SCALE_BITS[self.scale or ScaleType.F16]
        scale_bits += {Zero.NONE: 0, Zero.INT: self.bits, Zero.MIN: scale_bits}[self.zero]
        scales = math.prod(self.parameter_shape(shape))
        above = {ScaleType.E4M3: 32, ScaleType.DOUBLE: 32 * (1 + -(-scales // DOUBLE_QUANT_GROUP))}
        extra = above.get(self.scale, 0) if self.scale else 0
        codes = Fraction(self.bits, GRIDS[self.grid].weights_per_code)
        return codes + Fraction(scale_bits * scales + extra, math.prod(shape))

    def with_scale(self, scale: ScaleType) -> Scheme:
        """Return this scheme with its scale type filled in, if it was left open."""
        if self.scale is not None:
            return self
        return replace(self, scale=GRIDS[self.grid].scale or scale)


@dataclass(frozen=True, slots=True)
class Activation:
    """Quantization of the input of a linear layer at run time.

    Attributes:
        grid: as in `Scheme`.
        granularity: one scale per ``token``, per ``tensor``, or per group of channels of a token (``g128``).
        dynamic: whether the range is computed from the values at run time; otherwise calibration measures it (for
            ``nvfp4`` the range of the whole tensor, in addition to dynamic group scales).
        threshold: columns with a larger magnitude stay in 16 bits (LLM.int8(), arXiv 2208.07339); None for no such
            columns.
        max_outlier_columns: maximum number of columns whose weights stay in 16 bits too, because calibration saw them
            above the threshold.
    """

    grid: str
    granularity: str
    dynamic: bool = True
    threshold: float | None = None
    max_outlier_columns: int = 0

    @property
    def needs_calibration(self) -> bool:
        """Return whether calibration has to measure it: its range, or its outlier columns."""
        return not self.dynamic or self.max_outlier_columns > 0

    def __str__(self) -> str:
        text = f"{self.grid}:{self.granularity}:{'dynamic' if self.dynamic else 'static'}"
        text = text if self.threshold is None else f"{text}:{self.threshold:g}"
        return f"{text}:{self.max_outlier_columns}" if self.max_outlier_columns else text


@dataclass(frozen=True, slots=True)
class LayerScheme:
    """The scheme of a linear layer: that of its weight, and that of its input if it is quantized too."""

    weight: Scheme
    input: Activation | None = None

    def __str__(self) -> str:
        return str(self.weight) if self.input is None else f"{self.weight}+{self.input}"


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Sparsity of every row of a weight.

    Attributes:
        share: share of the columns of each row that is zero; their number is rounded down.
        num_nonzero: number of nonzero columns in every ``pattern_length`` consecutive ones (2 in 2:4); 0 if zeros may
            be anywhere in a row.
        pattern_length: length of the pattern (4 in 2:4); 1 without a pattern.
    """

    share: float
    num_nonzero: int = 0
    pattern_length: int = 1

    def __str__(self) -> str:
        return (
            f"{self.num_nonzero}:{self.pattern_length}" if self.num_nonzero else f"{self.share:.6g}"
        )

    def zeros(self, columns: int) -> int:
        """Return how many of the first ``columns`` columns of a row become zero."""
        if self.num_nonzero:
            return columns // self.pattern_length * (self.pattern_length - self.num_nonzero)
        return int(self.share * columns + 1e-9)

    def fits(self, columns: int) -> bool:
        """Return whether rows with this number of columns can have the pattern."""
        return columns % self.pattern_length == 0
