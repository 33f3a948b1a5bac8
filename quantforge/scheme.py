"""Schemes: how the numbers of one tensor are stored, as text, as data, and in bits.

``int4:g128:sym:f16`` reads: a grid of 4-bit integers, one scale for each run of 128 input columns, no zero point,
scales stored as float16. ``parse(str(scheme)) == scheme`` for every scheme. The fourth field may be left out; it
then takes the scale type of the format that the tensor is written to. The familiar aliases (``W4A16`` ...) are
spelled out in `ALIASES`. What follows a plus sign says how the input of a layer is quantized (`notation`).

Beside the integers there are ``nf4`` and ``fp4``, the codebooks of bitsandbytes, and ``fp8_e4m3`` (``fp8``) and
``fp8_e5m2``; `NATURAL` has the granularity that they take when it is left out. A grid whose layout another program
fixes (`SUPERBLOCKS`: ggml's) has no other fields: its name, ``q4_k``, is the whole scheme. So it is with `MICROSCALED`:
e2m1 or e4m3 elements under scales of 8 bits.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

from quantforge.errors import InputError, nearest


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
    E4M3 = "e4m3"  # under one float32 for the whole matrix
    DOUBLE = "double"  # 8 bits, in runs of `NESTED` that share a float32, and a float32 offset for the whole matrix


SCALE_BITS = {
    ScaleType.F16: 16, ScaleType.BF16: 16, ScaleType.F32: 32, ScaleType.E8M0: 8, ScaleType.E4M3: 8,
    ScaleType.DOUBLE: 8,
}  # fmt: skip
NESTED = 256  # bitsandbytes writes no other
INTEGER_BITS = range(2, 9)
INTEGER_SCALES = (ScaleType.F16, ScaleType.BF16, ScaleType.F32)


@dataclass(frozen=True, slots=True)
class PerGroup:
    """One scale for each run of ``size`` input columns of a row."""

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
    """One scale for each tile of ``rows`` by ``columns``; the last ones may be smaller."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


Granularity = PerGroup | Row | PerTensor | Tile


@dataclass(frozen=True, slots=True)
class Superblock:
    """A run of weights that ggml stores together.

    Attributes:
        bits: of one code.
        columns: weights of a block.
        block_bytes: bytes of a block: codes, scales, minima and what scales these.
        group: weights that share one scale.
        zero: whether groups have a minimum.
        scale: the type of the scale (or of the scale of the scales).
    """

    bits: int
    columns: int
    block_bytes: int
    group: int
    zero: Zero = Zero.NONE
    scale: ScaleType = ScaleType.F16


SUPERBLOCKS: dict[str, Superblock] = {
    "q4_0": Superblock(4, 32, 18, 32),
    "q4_1": Superblock(4, 32, 20, 32, Zero.MIN),
    "q5_0": Superblock(5, 32, 22, 32),
    "q5_1": Superblock(5, 32, 24, 32, Zero.MIN),
    "q8_0": Superblock(8, 32, 34, 32),
    "q2_k": Superblock(2, 256, 84, 16, Zero.MIN),
    "q3_k": Superblock(3, 256, 110, 16),
    "q4_k": Superblock(4, 256, 144, 32, Zero.MIN),
    "q5_k": Superblock(5, 256, 176, 32, Zero.MIN),
    "q6_k": Superblock(6, 256, 210, 16),
    "iq4_nl": Superblock(4, 32, 18, 32),
    "iq4_xs": Superblock(4, 256, 136, 32),
    "tq1_0": Superblock(2, 256, 54, 256),
    "tq2_0": Superblock(2, 256, 66, 256),
    "mxfp4": Superblock(4, 32, 17, 32, Zero.NONE, ScaleType.E8M0),
}
# Grids with scales of 8 bits and groups that are fixed (OCP Microscaling Formats 1.0; NVIDIA's nvfp4).
MICROSCALED: dict[str, tuple[PerGroup, ScaleType]] = {
    "nvfp4": (PerGroup(16), ScaleType.E4M3),
    "mxfp8": (PerGroup(32), ScaleType.E8M0),
}
NATURAL: dict[str, Granularity] = {
    "nf4": PerGroup(64),
    "fp4": PerGroup(64),
    "fp8_e4m3": Row(),
    "fp8_e5m2": Row(),
}
_SHORT = {"fp8": "fp8_e4m3"}
GRIDS: dict[str, int] = (
    {f"int{bits}": bits for bits in INTEGER_BITS}
    | {"nf4": 4, "fp4": 4, "fp8_e4m3": 8, "fp8_e5m2": 8, "nvfp4": 4, "mxfp8": 8}
    | {grid: block.bits for grid, block in SUPERBLOCKS.items()}
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Form in which one weight matrix ``[out_features, in_features]`` is stored."""

    grid: str
    granularity: Granularity
    zero: Zero = Zero.NONE
    scale: ScaleType | None = None

    def __str__(self) -> str:
        if self.grid in SUPERBLOCKS or self.grid in MICROSCALED:
            return self.grid
        fields = [self.grid, str(self.granularity), self.zero.value]
        return ":".join(fields if self.scale is None else [*fields, self.scale.value])

    @property
    def bits(self) -> int:
        """Return the bits of one code."""
        return GRIDS[self.grid]

    @property
    def block(self) -> Superblock | None:
        """Return the fixed layout, of a grid that has one."""
        return SUPERBLOCKS.get(self.grid)

    @property
    def symmetric(self) -> bool:
        """Return whether the grid has no zero point."""
        return self.zero is Zero.NONE

    @property
    def integer(self) -> bool:
        """Return whether values are ``scale * (code - zero)`` with plain parameters and integer codes."""
        return self.grid.startswith("int")

    @property
    def whole(self) -> bool:
        """Return whether rows share parameters, so that a matrix can only be rounded as one."""
        shared = isinstance(self.granularity, PerTensor | Tile)
        return shared or self.scale in {ScaleType.E4M3, ScaleType.DOUBLE}

    @property
    def joint(self) -> bool:
        """Return whether matrices that engines join have to share a parameter, so that they are rounded together."""
        one_scale = isinstance(self.granularity, PerTensor) and not self.integer
        return one_scale or self.scale is ScaleType.E4M3

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
        return self.bits + Fraction(scale_bits * scales + extra, math.prod(shape))

    def stored_as(self, scale: ScaleType) -> Scheme:
        """Return this scheme with its scale type filled in where it was left open."""
        if self.scale is not None:
            return self
        return replace(self, scale=ScaleType.F32 if self.grid in NATURAL else scale)


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


ALIASES: dict[str, str] = {
    "W2A16": "int2:g64:asym",
    "W3A16": "int3:g128:sym",
    "W4A16": "int4:g128:sym",
    "W4A16_ASYM": "int4:g128:asym",
    "W8A16": "int8:g128:sym",
    "W8A8": "int8:row:sym+int8:token:dynamic",
    "W8A8_STATIC": "int8:row:sym+int8:tensor:static",
    "LLM_INT8": "int8:row:sym+int8:token:dynamic:6:32",
    "FP8_DYNAMIC": "fp8_e4m3:row:sym+fp8_e4m3:token:dynamic",
    "FP8_STATIC": "fp8_e4m3:tensor:sym+fp8_e4m3:tensor:static",
    "FP8_BLOCK": "fp8_e4m3:128x128:sym+fp8_e4m3:g128:dynamic",
    "NVFP4A16": "nvfp4",
    "NVFP4_W4A4": "nvfp4+nvfp4:g16:static",
    "MXFP4A16": "mxfp4",
    "MXFP8A16": "mxfp8",
}
GROUP = re.compile(r"g([1-9][0-9]{0,6})")
_TILE = re.compile(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})")


def parse(text: str) -> Scheme:
    """Parse the notation or an alias of a weight.

    Raises:
        InputError: the text is no scheme; the hint names the nearest thing that is.
    """
    fields = ALIASES.get(text.upper(), text).lower().split(":")
    if "+" in ALIASES.get(text.upper(), text):
        raise InputError(
            f"scheme '{text}': quantized inputs have no place here", "a weight's alone"
        )
    grid = fields[0] = grid_of(text, fields[0])
    if grid in SUPERBLOCKS or grid in MICROSCALED:
        return _fixed(text, fields)
    if len(fields) == 1:
        fields += [str(NATURAL.get(grid, PerGroup(128)))]
    if len(fields) == 2:
        fields += ["sym"]
    if len(fields) > 4:
        raise InputError(
            f"scheme '{text}': more than four fields", "write GRID:GRANULARITY:ZERO:SCALE"
        )
    return Scheme(
        grid,
        _granularity(text, fields[1], grid),
        _zero(text, fields[2], grid),
        _scale(text, fields[3:], grid),
    )


def grid_of(text: str, field: str) -> str:
    """Return the grid that ``field`` of a scheme ``text`` means, or raise `InputError`."""
    grid = _SHORT.get(field, field)
    if grid not in GRIDS:
        raise InputError(
            f"scheme '{text}': unknown grid '{field}'", nearest(field, [*GRIDS, *_SHORT, *ALIASES])
        )
    return grid


def _fixed(text: str, fields: list[str]) -> Scheme:
    grid = fields[0]
    if len(fields) > 1:
        raise InputError(f"scheme '{text}': the layout of {grid} is fixed", f"write {grid}")
    if grid in MICROSCALED:
        granularity, scale = MICROSCALED[grid]
        return Scheme(grid, granularity, Zero.NONE, scale)
    block = SUPERBLOCKS[grid]
    return Scheme(grid, PerGroup(block.group), block.zero, block.scale)


def _granularity(text: str, field: str, grid: str) -> Granularity:
    found: Granularity | None = None
    if match := GROUP.fullmatch(field):
        found = PerGroup(int(match[1]))
    elif field in {"row", "channel"}:
        found = Row()
    elif field == "tensor":
        found = PerTensor()
    elif (match := _TILE.fullmatch(field)) and grid.startswith("fp8"):
        found = Tile(int(match[1]), int(match[2]))
    known = "g128 (any size), row or tensor"
    if grid in {"nf4", "fp4"}:
        known = "g64 (any size)"
        found = found if isinstance(found, PerGroup) else None
    elif grid.startswith("fp8"):
        known += ", or 128x128"
    if found is None:
        raise InputError(f"scheme '{text}': unknown granularity '{field}'", f"write {known}")
    return found


def _zero(text: str, field: str, grid: str) -> Zero:
    known = ("sym", "asym", "min") if grid.startswith("int") else ("sym",)
    if field in known:
        return Zero(field)
    raise InputError(f"scheme '{text}': unknown zero '{field}'", f"write {' or '.join(known)}")


def _scale(text: str, fields: list[str], grid: str) -> ScaleType | None:
    if not fields:
        return None
    known = (ScaleType.F32, ScaleType.DOUBLE) if grid in {"nf4", "fp4"} else INTEGER_SCALES
    if fields[0] in known:
        return ScaleType(fields[0])
    raise InputError(
        f"scheme '{text}': unknown scale type '{fields[0]}'", nearest(fields[0], known)
    )
