"""Schemes: how the numbers of one tensor are stored, as text, as data, and in bits.

``int4:g128:sym:f16`` reads: a grid of 4-bit integers, one scale for each run of 128 input columns, no zero point,
scales stored as float16. ``parse(str(scheme)) == scheme`` for every scheme. The fourth field may be left out; it
then takes the scale type of the format that the tensor is written to. The familiar aliases (``W4A16`` ...) are
spelled out in `ALIASES`. What follows a plus sign says how the input of a layer is quantized (`notation`).

Beside the integers there are ``nf4`` and ``fp4``, the codebooks of bitsandbytes, and ``fp8_e4m3`` (``fp8``) and
``fp8_e5m2``. A grid whose layout another program fixes (ggml's), or that has one granularity and one type of scales
(e2m1 or e4m3 elements under scales of 8 bits), has no other fields: its name, ``q4_k``, is the whole scheme. `grids`
has them all.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from quantforge.errors import InputError, nearest
from quantforge.grids import (
    GRIDS,
    NESTED,
    SCALE_BITS,
    Granularity,
    PerGroup,
    PerTensor,
    Row,
    ScaleType,
    Superblock,
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
    def block(self) -> Superblock | None:
        """Return the fixed layout, of a grid that has one."""
        return GRIDS[self.grid].superblock

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
    def separate(self) -> bool:
        """Return whether each group of each row has parameters of its own, so that it can be fitted alone."""
        alone = self.block is None or self.block.group == self.block.columns
        return isinstance(self.granularity, PerGroup) and not self.whole and alone

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

    def stored_as(self, scale: ScaleType) -> Scheme:
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
    if not GRIDS[grid].free:
        return _fixed(text, fields)
    if len(fields) == 1:
        fields += [str(GRIDS[grid].natural)]
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
    shorts = {grid.short: key for key, grid in GRIDS.items() if grid.short}
    grid = shorts.get(field, field)
    if grid not in GRIDS:
        raise InputError(
            f"scheme '{text}': unknown grid '{field}'", nearest(field, [*GRIDS, *shorts, *ALIASES])
        )
    return grid


def _fixed(text: str, fields: list[str]) -> Scheme:
    grid = fields[0]
    if len(fields) > 1:
        raise InputError(f"scheme '{text}': the layout of {grid} is fixed", f"write {grid}")
    known = GRIDS[grid]
    if known.fixed is not None:
        granularity, scale = known.fixed
        return Scheme(grid, granularity, Zero.NONE, scale)
    block = known.superblock
    assert block is not None
    return Scheme(grid, PerGroup(block.group), block.zero, block.scale)


def _granularity(text: str, field: str, grid: str) -> Granularity:
    found: Granularity | None = None
    if match := GROUP.fullmatch(field):
        found = PerGroup(int(match[1]))
    elif field in {"row", "channel"}:
        found = Row()
    elif field == "tensor":
        found = PerTensor()
    elif (match := _TILE.fullmatch(field)) and GRIDS[grid].tiles:
        found = Tile(int(match[1]), int(match[2]))
    known = "g128 (any size), row or tensor"
    if GRIDS[grid].groups_only:
        known = "g64 (any size)"
        found = found if isinstance(found, PerGroup) else None
    elif GRIDS[grid].tiles:
        known += ", or 128x128"
    if found is None:
        raise InputError(f"scheme '{text}': unknown granularity '{field}'", f"write {known}")
    return found


def _zero(text: str, field: str, grid: str) -> Zero:
    known = GRIDS[grid].zeros
    if field in known:
        return Zero(field)
    raise InputError(f"scheme '{text}': unknown zero '{field}'", f"write {' or '.join(known)}")


def _scale(text: str, fields: list[str], grid: str) -> ScaleType | None:
    if not fields:
        return None
    known = GRIDS[grid].scales
    if fields[0] in known:
        return ScaleType(fields[0])
    raise InputError(
        f"scheme '{text}': unknown scale type '{fields[0]}'", nearest(fields[0], known)
    )
