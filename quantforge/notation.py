"""The notation of schemes: how a user types the way that numbers are stored.

``int4:g128:sym:f16`` means: a grid of 4-bit integers, one scale for each group of 128 input columns, no zero point,
scales stored as float16. If the fourth field is left out, the scale type is that of the format. Familiar names
(``W4A16`` ...) are aliases, listed in `ALIASES`. Besides the integers there are ``nf4`` and ``fp4``, the codebooks of
bitsandbytes, and ``fp8_e4m3`` (``fp8``) and ``fp8_e5m2``; a grid with a fixed layout, such as ``q4_k``, is a whole
scheme by itself.

``int8:row:sym+int8:token:dynamic`` means: 8-bit integer weights with a scale per row, and inputs rounded to 8-bit
integers with a scale for each token. ``static`` stands for a range that was measured in calibration. A fourth field is
the threshold of LLM.int8(), a fifth the maximum number of columns whose weights are kept in 16 bits.
``parse(str(scheme)) == scheme`` and ``parse_layer(str(layer)) == layer`` hold for every scheme and layer.
"""

from __future__ import annotations

import re

from quantforge.errors import InputError, nearest_hint
from quantforge.grids import (
    DEFAULT_GROUP_SIZE,
    GRIDS,
    Granularity,
    PerGroup,
    PerTensor,
    Row,
    ScaleType,
    Tile,
    Zero,
)
from quantforge.scheme import Activation, LayerScheme, Scheme, Sparsity

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
# Words of other tools (see `quantforge.errors.nearest_hint`): schemes, bit widths like w4a16_g128, and GGUF types.
_OTHER_TOOLS_WORDS: dict[str, str] = {
    "w8a8int8 int8dynamic int8w8a8 w8a8dynamic int8int8": "write W8A8",
    "w8a8fp8 fp8w8a8 fp8pertensor float8 fp8dynamicpertoken": "write FP8_DYNAMIC",
    "w4a8 w4a8int8 int4w4a8": "write int4:g128:sym+int8:token:dynamic",
    "w4a4": "write NVFP4_W4A4",
    "bnb4bit nf4doublequant nf4double": "write nf4:g64:sym:double",
    "fp16 bf16 float16 bfloat16 f16 none": "--ignore PATTERN leaves layers as they are",
}
_WIDTH = re.compile(
    r"(?:w|u?int|q|b)?([2-8])(?:bits?|w|a16)?(?:(?:groupsize|group|gs|g)([1-9]\d*))?(a?sym)?"
)
_GGUF_TYPE = re.compile(r"i?q[1-8](?:[01]|k?[sml]|k|x+s|nl)+")
_GROUP = re.compile(r"g([1-9][0-9]{0,6})")
_MAX_PATTERN_LENGTH = 32  # columns in a sparsity pattern, such as 4 in 2:4
SPARSITY_HINT = "a share of every row, e.g. 50%, or how many of neighbours stay, e.g. 2:4"
_TILE = re.compile(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})")


def parse(text: str) -> Scheme:
    """Parse the scheme of a weight, in the notation or as an alias.

    Raises:
        InputError: the text is not a scheme; the hint suggests the nearest one.
    """
    fields = ALIASES.get(text.upper(), text).lower().split(":")
    if "+" in ALIASES.get(text.upper(), text):
        raise InputError(
            f"scheme '{text}': quantized inputs have no place here", "a weight's alone"
        )
    grid = fields[0] = _grid_of(text, fields[0])
    if not GRIDS[grid].has_parameters:
        return _fixed_layout_scheme(text, fields)
    if len(fields) == 1:
        fields += [str(GRIDS[grid].default_granularity)]
    if len(fields) == 2:
        fields += ["sym"]
    if len(fields) > 4:
        raise InputError(
            f"scheme '{text}': more than four fields", "write GRID:GRANULARITY:ZERO:SCALE"
        )
    return Scheme(
        grid,
        _granularity(text, fields[1], grid),
        _zero_point(text, fields[2], grid),
        _scale_type(text, fields[3:], grid),
    )


def _grid_of(text: str, field: str) -> str:
    """Return the grid that a field of the scheme ``text`` names, or raise `InputError`."""
    shorts = {grid.short_name: key for key, grid in GRIDS.items() if grid.short_name}
    grid = shorts.get(field, field)
    if grid not in GRIDS:
        hint = _scheme_hint(text) or nearest_hint(
            field, [*GRIDS, *shorts, *ALIASES], _OTHER_TOOLS_WORDS
        )
        raise InputError(f"scheme '{text}': unknown grid '{field}'", hint)
    return grid


def _scheme_hint(text: str) -> str:
    """Return a hint for a scheme in the words of another tool, "" if it is not understood."""
    bare = re.sub(r"[\W_]", "", text.lower())
    if _GGUF_TYPE.fullmatch(bare):
        return f"types of GGUF files are an option of their own: --type {text.upper()}"
    match = _WIDTH.fullmatch(bare)
    if not match:
        return ""
    bits, group, zero = match[1], match[2] or DEFAULT_GROUP_SIZE, match[3] or "sym"
    return f"write int{bits}:g{group}:{zero}"


def _fixed_layout_scheme(text: str, fields: list[str]) -> Scheme:
    grid = fields[0]
    if len(fields) > 1:
        raise InputError(f"scheme '{text}': the layout of {grid} is fixed", f"write {grid}")
    grid_info = GRIDS[grid]
    if grid_info.fixed is not None:
        granularity, scale = grid_info.fixed
        return Scheme(grid, granularity, Zero.NONE, scale)
    block = grid_info.block
    assert block is not None
    return Scheme(grid, PerGroup(block.group_size), block.zero, block.scale)


def _granularity(text: str, field: str, grid: str) -> Granularity:
    granularity: Granularity | None = None
    if match := _GROUP.fullmatch(field):
        granularity = PerGroup(int(match[1]))
    elif field in {"row", "channel"}:
        granularity = Row()
    elif field == "tensor":
        granularity = PerTensor()
    elif (match := _TILE.fullmatch(field)) and GRIDS[grid].tiles:
        granularity = Tile(int(match[1]), int(match[2]))
    known_text = "g128 (any size), row or tensor"
    if GRIDS[grid].groups_only:
        known_text = "g64 (any size)"
        granularity = granularity if isinstance(granularity, PerGroup) else None
    elif GRIDS[grid].tiles:
        known_text += ", or 128x128"
    if granularity is None:
        raise InputError(f"scheme '{text}': unknown granularity '{field}'", f"write {known_text}")
    return granularity


def _zero_point(text: str, field: str, grid: str) -> Zero:
    allowed_zeros = GRIDS[grid].zeros
    if field in allowed_zeros:
        return Zero(field)
    raise InputError(
        f"scheme '{text}': unknown zero '{field}'", f"write {' or '.join(allowed_zeros)}"
    )


def _scale_type(text: str, fields: list[str], grid: str) -> ScaleType | None:
    if not fields:
        return None
    allowed_scales = GRIDS[grid].scales
    if fields[0] in allowed_scales:
        return ScaleType(fields[0])
    raise InputError(
        f"scheme '{text}': unknown scale type '{fields[0]}'",
        nearest_hint(fields[0], allowed_scales),
    )


def parse_layer(text: str) -> LayerScheme:
    """Parse the scheme of a layer (weight and optional input), or an alias; errors as `parse`."""
    weight, plus, activation = ALIASES.get(text.upper(), text).partition("+")
    return LayerScheme(parse(weight), _activation(activation) if plus else None)


def _activation(text: str) -> Activation:
    fields = text.lower().split(":")
    if not 2 <= len(fields) <= 5:
        raise InputError(f"activation '{text}': 2 to 5 fields", "e.g. int8:token:dynamic")
    fields += ["dynamic"] if len(fields) == 2 else []
    grid, granularity, mode = _grid_of(text, fields[0]), fields[1], fields[2]
    if granularity not in {"token", "tensor"} and not _GROUP.fullmatch(granularity):
        raise InputError(f"activation '{text}': '{granularity}'", "write token, tensor or g128")
    if mode not in {"dynamic", "static"} or (mode == "static" and granularity == "token"):
        raise InputError(f"activation '{text}': '{mode}'", "write token:dynamic or tensor:static")
    threshold, max_outlier_columns = (
        _threshold(text, fields[3:4]),
        _outlier_columns(text, fields[4:]),
    )
    return Activation(grid, granularity, mode == "dynamic", threshold, max_outlier_columns)


def _threshold(text: str, fields: list[str]) -> float | None:
    if not fields:
        return None
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4})?", fields[0]) or not float(fields[0]):
        raise InputError(f"activation '{text}': threshold '{fields[0]}'", "a number, e.g. 6")
    return float(fields[0])


def _outlier_columns(text: str, fields: list[str]) -> int:
    if not fields:
        return 0
    if not re.fullmatch(r"[1-9][0-9]{0,4}", fields[0]):
        raise InputError(f"activation '{text}': '{fields[0]}' columns", "a number, e.g. 32")
    return int(fields[0])


def parse_sparsity(text: str) -> Sparsity:
    """Parse the share of each row that becomes zero (``50%``, ``0.5``), or a pattern of nonzero columns (``2:4``).

    Raises:
        InputError: the text is neither.
    """
    pattern = re.fullmatch(r"(\d{1,2}):(\d{1,2})", text)
    if pattern:
        stay, run = int(pattern[1]), int(pattern[2])
        if 0 < stay < run <= _MAX_PATTERN_LENGTH:
            return Sparsity(1 - stay / run, stay, run)
        raise InputError(f"sparsity = {text!r}", SPARSITY_HINT)
    return Sparsity(parse_share(text, "sparsity", SPARSITY_HINT))


def parse_share(
    text: str, key: str, hint: str = "a share, 25% or 0.25; not a number of them"
) -> float:
    """Parse a share, ``25%`` or ``0.25``; raise `InputError` naming ``key`` unless it is between 0 and 1."""
    try:
        share = float(text.removesuffix("%")) / (100 if "%" in text else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise InputError(f"{key} = {text!r}", hint)
    return share
