"""Schemes: how the numbers of one tensor are stored, as text, as data, and in bits.

``int4:g128:sym:f16`` reads: a grid of 4-bit integers, one scale for each run of 128 input columns, no zero point,
scales stored as float16. ``parse(str(scheme)) == scheme`` for every scheme. The fourth field may be left out; it
then takes the scale type of the format that the tensor is written to. The familiar aliases (``W4A16`` ...) are
spelled out in `ALIASES`.
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


SCALE_BITS = {ScaleType.F16: 16, ScaleType.BF16: 16, ScaleType.F32: 32}
INTEGER_BITS = range(2, 9)
GRIDS: dict[str, int] = {f"int{bits}": bits for bits in INTEGER_BITS}


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


Granularity = PerGroup | Row | PerTensor


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one weight matrix ``[out_features, in_features]`` is stored."""

    grid: str
    granularity: Granularity
    zero: Zero = Zero.NONE
    scale: ScaleType | None = None

    def __str__(self) -> str:
        fields = [self.grid, str(self.granularity), self.zero.value]
        return ":".join(fields if self.scale is None else [*fields, self.scale.value])

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return GRIDS[self.grid]

    @property
    def symmetric(self) -> bool:
        """Whether the grid has no zero point."""
        return self.zero is Zero.NONE

    def group_size(self, in_features: int) -> int:
        """Input columns that share one scale (``in_features`` per row and per tensor)."""
        return self.granularity.size if isinstance(self.granularity, PerGroup) else in_features

    def groups(self, in_features: int) -> int:
        """Scales along one row; raises `ValueError` when the group size does not divide."""
        size = self.group_size(in_features)
        if in_features % size:
            raise ValueError(f"{in_features} columns are not a multiple of the group size {size}")
        return in_features // size

    def parameter_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of scales and zeros for a weight of ``shape`` (out, in)."""
        if isinstance(self.granularity, PerTensor):
            return (1, 1)
        return (shape[0], self.groups(shape[1]))

    def bits_per_weight(self, shape: tuple[int, int]) -> Fraction:
        """Exact information bits per weight: codes, scales and zero points, without any padding."""
        scale_bits = SCALE_BITS[self.scale or ScaleType.F16] + (0 if self.symmetric else self.bits)
        return self.bits + Fraction(
            scale_bits * math.prod(self.parameter_shape(shape)), math.prod(shape)
        )

    def stored_as(self, scale: ScaleType) -> Scheme:
        """Return this scheme with its scale type filled in where it was left open."""
        return self if self.scale is not None else replace(self, scale=scale)


@dataclass(frozen=True, slots=True)
class Activation:
    """How the input of a linear layer is quantized at run time."""

    grid: str
    granularity: str  # "token" or "tensor"
    dynamic: bool = True


@dataclass(frozen=True, slots=True)
class LayerScheme:
    """The scheme of a linear layer: its weight, and its input when that is quantized too."""

    weight: Scheme
    input: Activation | None = None

    def __str__(self) -> str:
        if self.input is None:
            return str(self.weight)
        mode = "dynamic" if self.input.dynamic else "static"
        return f"{self.weight}+{self.input.grid}:{self.input.granularity}:{mode}"


ALIASES: dict[str, str] = {
    "W2A16": "int2:g64:asym",
    "W3A16": "int3:g128:sym",
    "W4A16": "int4:g128:sym",
    "W4A16_ASYM": "int4:g128:asym",
    "W8A16": "int8:g128:sym",
}
_GROUP = re.compile(r"g([1-9][0-9]{0,6})")


def parse(text: str) -> Scheme:
    """Parse the notation or an alias.

    Raises:
        InputError: the text is no scheme; the hint names the nearest thing that is.
    """
    fields = ALIASES.get(text.upper(), text).lower().split(":")
    if len(fields) == 1:
        fields += ["g128"]
    if len(fields) == 2:
        fields += ["sym"]
    if len(fields) > 4:
        raise InputError(
            f"scheme '{text}': more than four fields", "write GRID:GRANULARITY:ZERO:SCALE"
        )
    grid = fields[0]
    if grid not in GRIDS:
        raise InputError(
            f"scheme '{text}': unknown grid '{grid}'", nearest(grid, [*GRIDS, *ALIASES])
        )
    return Scheme(
        grid, _granularity(text, fields[1]), _zero(text, fields[2]), _scale(text, fields[3:])
    )


def _granularity(text: str, field: str) -> Granularity:
    if match := _GROUP.fullmatch(field):
        return PerGroup(int(match[1]))
    if field in {"row", "channel"}:
        return Row()
    if field == "tensor":
        return PerTensor()
    raise InputError(
        f"scheme '{text}': unknown granularity '{field}'", "write g128 (any size), row or tensor"
    )


def _zero(text: str, field: str) -> Zero:
    if field in {Zero.NONE.value, Zero.INT.value}:
        return Zero(field)
    raise InputError(f"scheme '{text}': unknown zero '{field}'", "write sym or asym")


def _scale(text: str, fields: list[str]) -> ScaleType | None:
    if not fields:
        return None
    if fields[0] in list(ScaleType):
        return ScaleType(fields[0])
    raise InputError(
        f"scheme '{text}': unknown scale type '{fields[0]}'", nearest(fields[0], list(ScaleType))
    )
