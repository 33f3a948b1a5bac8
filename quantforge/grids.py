"""Grids: the numbers that the codes of a quantized tensor can represent, one record for each, and the parts of schemes.

A record has everything that other modules need to know of a grid without importing its packer: the width of a code, how
many weights it stands for, the granularities, zero points and scales that it is stored with, and for ggml's types the
layout of their blocks, their id in GGUF files and the values of their codes. A new grid needs one record here and a
packer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Zero(StrEnum):
    """The zero point of a grid: none (symmetric), an integer code, or a stored minimum."""

    NONE = "sym"
    INT = "asym"
    MIN = "min"


class ScaleType(StrEnum):
    """The stored type of scales."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    E8M0 = "e8m0"  # a power of two
    E4M3 = "e4m3"  # multiplied by one float32 scale of the whole matrix
    DOUBLE = "double"  # 8 bits, in groups of `DOUBLE_QUANT_GROUP` that share a float32, and one float32 offset


SCALE_BITS = {
    ScaleType.F16: 16, ScaleType.BF16: 16, ScaleType.F32: 32, ScaleType.E8M0: 8, ScaleType.E4M3: 8,
    ScaleType.DOUBLE: 8,
}  # fmt: skip
DOUBLE_QUANT_GROUP = 256  # scales per float32 in double quantization, as in bitsandbytes
INTEGER_BITS = range(2, 9)
DEFAULT_GROUP_SIZE = (
    128  # of integers in schemes and formats that name no other; every engine loads it
)
INTEGER_SCALES = (ScaleType.F16, ScaleType.BF16, ScaleType.F32)


@dataclass(frozen=True, slots=True)
class PerGroup:
    """One scale for each group of ``size`` consecutive input columns of a row."""

    size: int

    def __str__(self) -> str:
        return f"g{self.size}"


@dataclass(frozen=True, slots=True)
class Row:
    """One scale for each output row."""

    def __str__(self) -> str:
        return "row"


@dataclass(frozen=True, slots=True)
class PerTensor:
    """One scale for the whole matrix."""

    def __str__(self) -> str:
        return "tensor"


@dataclass(frozen=True, slots=True)
class Tile:
    """One scale for each tile of ``rows`` by ``columns``; the last tiles may be smaller."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


Granularity = PerGroup | Row | PerTensor | Tile

# The smallest and the largest code, and the value of each code if it is not the code itself.
Codes = tuple[int, int] | tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class GgmlBlock:
    """A quantization type of ggml, which stores weights in blocks of 32 or 256 columns.

    Attributes:
        number: id of the type in the tensor table of a GGUF file.
        bits: bits of one code.
        columns: weights in a block.
        block_bytes: bytes of a block: codes, scales, minima, and the scales of these.
        group_size: weights that share one scale.
        codes: smallest and largest code, and the value of each code if it is not the code itself.
        units: smallest and largest integer that stores a group's scale (and minimum), multiplied by the block's scale;
            None if groups have no scales of their own.
        zero: whether groups have a minimum.
        scale: dtype of the block's scale.
        weights_per_code: weights that share a code.
    """

    number: int
    bits: int
    columns: int
    block_bytes: int
    group_size: int
    codes: Codes
    units: tuple[int, int] | None = None
    zero: Zero = Zero.NONE
    scale: ScaleType = ScaleType.F16
    weights_per_code: int = 1


@dataclass(frozen=True, slots=True)
class Grid:
    """Properties of one grid.

    Attributes:
        bits: bits of one code.
        packer: module of the packer, as a dotted path.
        weights_per_code: consecutive columns of a row that one code stands for; more than 1 for vector quantization.
        default_granularity: granularity if a scheme does not name one.
        groups_only: whether group scales are the only granularity.
        tiles: whether it can be stored with a scale per tile.
        zeros, scales: zero points and scale types that a scheme may name.
        fixed: the only granularity and scale type of a grid (OCP Microscaling Formats 1.0; NVIDIA's nvfp4); None if
            open.
        block: block layout of a ggml type; None for other grids.
        short_name: a shorter name; "" if there is none.
        scale: scale type if a scheme does not name one; None for that of the format.
        passes: how often `gptq` passes over all columns. From the second pass on, scales are first refitted to the
            compensated weights, which pays if codes are few or unevenly spaced, but not for fine integers.
        shrinkage: how much `gptq` shrinks correlations of activations, see `quantforge.quantizers.gptq.hessian`. With 2
            bits it reduces the divergence by a quarter on text unlike the calibration text.
        code_values: value of each code, in any unit, for a 4-bit grid whose codes are bit patterns; () for others.
    """

    bits: int
    packer: str
    weights_per_code: int = 1
    default_granularity: Granularity = PerGroup(DEFAULT_GROUP_SIZE)
    groups_only: bool = False
    tiles: bool = False
    zeros: tuple[Zero, ...] = (Zero.NONE,)
    scales: tuple[ScaleType, ...] = INTEGER_SCALES
    fixed: tuple[PerGroup, ScaleType] | None = None
    block: GgmlBlock | None = None
    short_name: str = ""
    scale: ScaleType | None = None
    passes: int = 2
    shrinkage: float = 0.0
    code_values: tuple[int, ...] = ()

    @property
    def has_parameters(self) -> bool:
        """Return whether a scheme can name more than the grid: granularity, zero point or scale type."""
        return self.fixed is None and self.block is None


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the magnitudes of e2m1 (OCP Microscaling formats 1.0), so that they are integers; bit 3 is the sign.
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def words_per_row(columns: int, bits: int) -> int:
    """Return the number of 32-bit words that hold ``columns`` codes without gaps."""
    return -(-columns * bits // 32)


def _integer_grid(bits: int) -> Grid:
    zeros, shrinkage = (Zero.NONE, Zero.INT, Zero.MIN), 0.05 if bits == 2 else 0.0
    packer, num_passes = "quantforge.packers.integer", 2 if bits <= 3 else 1
    return Grid(bits, packer, zeros=zeros, passes=num_passes, shrinkage=shrinkage)


def _codebook_grid() -> Grid:
    return Grid(
        4,
        "quantforge.packers.nf4",
        default_granularity=PerGroup(64),
        groups_only=True,
        scales=(ScaleType.F32, ScaleType.DOUBLE),
        scale=ScaleType.F32,
    )


def _float8_grid(short: str = "") -> Grid:
    return Grid(
        8,
        "quantforge.packers.fp8",
        default_granularity=Row(),
        tiles=True,
        short_name=short,
        scale=ScaleType.F32,
    )


def _microscaling_grid(bits: int, group: int, scale: ScaleType) -> Grid:
    num_passes = 4 if scale is ScaleType.E4M3 else 2
    code_values = E2M1_VALUES if bits == 4 else ()
    return Grid(
        bits,
        "quantforge.packers.fp4",
        fixed=(PerGroup(group), scale),
        passes=num_passes,
        code_values=code_values,
    )


_MINIMUM, _GGML_PACKER = Zero.MIN, "quantforge.packers.ggml.packer"
GGML_BLOCKS: Mapping[str, GgmlBlock] = {
    "q4_0": GgmlBlock(2, 4, 32, 18, 32, (-8, 7)),
    "q4_1": GgmlBlock(3, 4, 32, 20, 32, (0, 15), zero=_MINIMUM),
    "q5_0": GgmlBlock(6, 5, 32, 22, 32, (-16, 15)),
    "q5_1": GgmlBlock(7, 5, 32, 24, 32, (0, 31), zero=_MINIMUM),
    "q8_0": GgmlBlock(8, 8, 32, 34, 32, (-128, 127)),
    "q2_k": GgmlBlock(10, 2, 256, 84, 16, (0, 3), (0, 15), _MINIMUM),
    "q3_k": GgmlBlock(11, 3, 256, 110, 16, (-4, 3), (-32, 31)),
    "q4_k": GgmlBlock(12, 4, 256, 144, 32, (0, 15), (0, 63), _MINIMUM),
    "q5_k": GgmlBlock(13, 5, 256, 176, 32, (0, 31), (0, 63), _MINIMUM),
    "q6_k": GgmlBlock(14, 6, 256, 210, 16, (-32, 31), (-128, 127)),
    "iq4_nl": GgmlBlock(20, 4, 32, 18, 32, (0, 15, IQ4_VALUES)),
    "iq4_xs": GgmlBlock(23, 4, 256, 136, 32, (0, 15, IQ4_VALUES), (-32, 31)),
    "tq1_0": GgmlBlock(34, 2, 256, 54, 256, (-1, 1)),
    "tq2_0": GgmlBlock(35, 2, 256, 66, 256, (-1, 1)),
    "mxfp4": GgmlBlock(39, 4, 32, 17, 32, (0, 15, E2M1_VALUES), scale=ScaleType.E8M0),
    # Points of lattices: `quantforge.packers.lattices` has what their codes stand for.
    "iq1_s": GgmlBlock(19, 11, 256, 50, 32, (0, (1 << 11) - 1), (0, 7), weights_per_code=8),
    "iq1_m": GgmlBlock(29, 12, 256, 56, 16, (0, (1 << 12) - 1), (0, 7), weights_per_code=8),
    "iq2_xxs": GgmlBlock(16, 15, 256, 66, 32, (0, (1 << 16) - 1), (0, 15), weights_per_code=8),
    "iq2_xs": GgmlBlock(17, 16, 256, 74, 16, (0, (1 << 17) - 1), (0, 15), weights_per_code=8),
    "iq2_s": GgmlBlock(22, 18, 256, 82, 16, (0, (1 << 18) - 1), (0, 15), weights_per_code=8),
    "iq3_xxs": GgmlBlock(18, 23, 256, 98, 32, (0, (1 << 24) - 1), (0, 15), weights_per_code=8),
    "iq3_s": GgmlBlock(21, 13, 256, 110, 32, (0, (1 << 13) - 1), (0, 15), weights_per_code=4),
}
GRIDS: Mapping[str, Grid] = {
    **{f"int{bits}": _integer_grid(bits) for bits in INTEGER_BITS},
    "nf4": _codebook_grid(),
    "fp4": _codebook_grid(),
    "fp8_e4m3": _float8_grid("fp8"),
    "fp8_e5m2": _float8_grid(),
    "nvfp4": _microscaling_grid(4, 16, ScaleType.E4M3),
    "mxfp8": _microscaling_grid(8, 32, ScaleType.E8M0),
    **{
        key: Grid(
            block.bits,
            _GGML_PACKER if block.weights_per_code == 1 else "quantforge.packers.lattices.packer",
            weights_per_code=block.weights_per_code,
            block=block,
        )
        for key, block in GGML_BLOCKS.items()
    },
}
