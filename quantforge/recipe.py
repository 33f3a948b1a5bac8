"""The recipe: what is wanted, as typed data, read from and written to TOML.

A recipe holds intent only; the plan decides. Every key has one meaning and a default, an unknown key is an error
that names the nearest one, and ``from_toml(to_toml(recipe)) == recipe``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from quantforge.checkpoint.files import FILES
from quantforge.errors import InputError, nearest
from quantforge.grids import INTEGER_BITS
from quantforge_files.roles import RECIPE

# Reading a key takes the square of its parts; a line is what no string of it counts for.
MAX_PARTS, MAX_LINE = 32, 20_000
# Least and most of every whole number; more sweeps or points would only keep a machine busy.
LIMITS = {
    "bits": (min(INTEGER_BITS), max(INTEGER_BITS)),
    "gptq.refine": (0, 1000),
    "tensor_parallel": (1, 2**20),
    "awq.points": (20, 1000),
    "awq.rows": (1, 2**40),
    "calibration.samples": (1, 2**32),
    "calibration.length": (2, 2**32),
    "calibration.micro_batch": (1, 2**32),
    "max_shard_bytes": (1, 2**60),
}
# Strings and comments of TOML. No alternative ever fails once it has begun, so that one pass is enough.
_STRING = re.compile(
    r'''"""(?:[^"\\]+|\\[\s\S]|"(?!""))*(?:"""|\Z|\\)'''
    r"""|'''(?:[^']+|'(?!''))*(?:'''|\Z)"""
    r"""|"(?:[^"\\\n]+|\\[^\n])*(?:"|\n|\Z|\\)"""
    r"""|'[^'\n]*(?:'|\n|\Z)|\#[^\n]*"""
)


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """``[gptq]``: see `quantforge.quantizers.gptq`."""

    damping: float = 0.01  # of the mean of the Hessian's diagonal
    order: str = "activation"  # processing order of the columns: activation | natural
    group_scales: str = (
        "static"  # static: from the original weights; refresh: from the compensated ones
    )
    refine: int = (
        2  # sweeps of coordinate descent over the codes, each followed by a refit of the scales
    )


@dataclass(frozen=True, slots=True)
class AwqOptions:
    """``[awq]``: see `quantforge.quantizers.awq`."""

    points: int = 20  # of the exponent grid
    duo: bool = True  # divide by the weight's own magnitude as well
    clip: bool = True  # search a clipping range
    rows: int = 16  # calibration rows that the search compares outputs on


@dataclass(frozen=True, slots=True)
class Rounding:
    """The part of a recipe that methods see: how scales are chosen, and the options of each method."""

    scales: str = "search"  # as of `Recipe`
    gptq: GptqOptions = field(default_factory=GptqOptions)
    awq: AwqOptions = field(default_factory=AwqOptions)

    @property
    def weighs(self) -> bool:
        """Return whether scales are chosen by what the layers read, where that is known."""
        return self.scales != "absmax"


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """``[calibration]``: where the text comes from and how it is cut."""

    source: str = "builtin"
    samples: int = 128  # rows
    length: int = 512  # tokens of a row
    seed: int = 0
    chat_template: bool = False  # render `messages` documents through the model's chat template
    propagate: str = "source"  # what the next block reads: outputs of the source's blocks | of the quantized ones
    micro_batch: int = 2  # rows of one forward; part of the recipe because sums depend on it
    precision: str = "float32"  # of the products of the forward: float32 | bfloat16, twice as fast where it is native
    column: str = "text"
    sha256: tuple[
        str, ...
    ] = ()  # `DIGEST  NAME` of the files of `source`, see `quantforge.planning.cited_files`


@dataclass(frozen=True, slots=True)
class Rule:
    """``[[rule]]``: the scheme of the tensors that a pattern matches (``keep`` leaves them alone)."""

    match: str
    scheme: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """Choices that decide the result for a model. ``bits`` is the one dial; ``scheme`` is the expert's."""

    method: str = "rtn"
    bits: int | None = None
    scheme: str | None = None
    format: str = (
        ""  # "": by the name of the result, the type, the engine or the scheme (`formats.choice`)
    )
    scales: str = "search"  # absmax | search | reference (ggml's own quantizer)
    ignore: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    inputs: str = "absmax"  # range of static inputs: absmax | percentile | mse
    kv_cache: str = "none"  # measured scales of an fp8 cache: none | fp8 (per tensor) | fp8_head
    engine: str | None = None  # that has to load the result
    tensor_parallel: int = 1  # devices that it is split over
    head: str = "keep"  # scheme of the output projection, or keep
    embedding: str = "keep"
    max_shard_bytes: int | None = None  # None: 5 GB for safetensors, one file for GGUF
    type: str | None = None  # GGUF: the mixture, e.g. Q4_K_M
    pre: str | None = (
        None  # GGUF: llama.cpp's name of the pre-tokenizer, where it is not recognised
    )
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    gptq: GptqOptions = field(default_factory=GptqOptions)
    awq: AwqOptions = field(default_factory=AwqOptions)

    def __post_init__(self) -> None:
        _one_of("scales", self.scales, ("absmax", "search", "reference"))
        _one_of("inputs", self.inputs, ("absmax", "percentile", "mse"))
        _one_of("kv_cache", self.kv_cache, ("none", "fp8", "fp8_head"))
        _one_of("calibration.precision", self.calibration.precision, ("float32", "bfloat16"))
        _one_of("calibration.propagate", self.calibration.propagate, ("source", "quantized"))
        _one_of("gptq.order", self.gptq.order, ("activation", "natural"))
        _one_of("gptq.group_scales", self.gptq.group_scales, ("static", "refresh"))
        if self.bits is not None and self.scheme is not None:
            raise InputError(
                "recipe: 'bits' and 'scheme' are both given",
                "--bits is the dial, --scheme the expert's",
            )
        for name, (least, most) in LIMITS.items():
            value = attrgetter(name)(self)
            if value is not None and not least <= value <= most:
                kind = "small" if value < least else "large"
                raise InputError(
                    f"recipe: {name} = {value} is too {kind}", f"from {least} to {most}"
                )
        if self.type is not None and (self.bits is not None or self.scheme is not None):
            raise InputError(
                "recipe: 'type' is given beside 'bits' or 'scheme'", "a type decides every tensor"
            )
        if not 0 < self.gptq.damping < 1:
            raise InputError(
                f"recipe: gptq.damping = {self.gptq.damping}", "between 0 and 1, e.g. 0.01"
            )

    @property
    def rounding(self) -> Rounding:
        """Return the part that methods see."""
        return Rounding(self.scales, self.gptq, self.awq)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"recipe: {name} = {value!r}", nearest(value, known))


def _bare(text: str) -> str:
    """Remove strings and comments from TOML; of a recipe, few dots and a few hundred characters in a line are left."""
    return _STRING.sub("", text)


def read_toml(text: str, origin: str) -> dict[str, Any]:
    """Return the content of a recipe, unchecked; `InputError` when not TOML, or larger or deeper than any recipe."""
    if len(text) > RECIPE.limit or any(
        line.count(".") > MAX_PARTS or len(line) > MAX_LINE for line in _bare(text).splitlines()
    ):
        raise InputError(f"{origin}: no recipe is that large", "see `quantforge recipes`")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits
        raise InputError(
            f"{origin}: not TOML: {error}", "see `quantforge recipes` for examples"
        ) from error


def from_toml(text: str, origin: str = "recipe") -> Recipe:
    """Parse a recipe.

    Raises:
        InputError: not TOML, an unknown key (the nearest one is named), or a value of the wrong type.
    """
    data = read_toml(text, origin)
    if "rules" in data:
        raise InputError(f"{origin}: unknown key 'rules'", "did you mean '[[rule]]'?")
    if "rule" in data:
        data["rules"] = data.pop("rule")
    built: Recipe = _build(Recipe, data, origin)
    return built


def read_recipe(path: Path) -> Recipe:
    """Read a recipe file; errors as `Opener.text` and `from_toml`."""
    return from_toml(FILES.text(path, RECIPE, None), str(path))


def _build(kind: type[Any], data: Mapping[str, Any], origin: str) -> Any:
    hints = get_type_hints(kind)
    known = {item.name for item in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in known:
            names = {"rule" if name == "rules" else name for name in known}
            raise InputError(f"{origin}: unknown key '{key}'", nearest(key, names))
        values[key] = _convert(hints[key], value, f"{origin}: {key}")
    for item in fields(kind):
        needed = item.default is MISSING and item.default_factory is MISSING
        if needed and item.name not in values:
            raise InputError(
                f"{origin}: '{item.name}' is missing", "a rule has `match` and `scheme`"
            )
    return kind(**values)


def _convert(hint: Any, value: Any, origin: str) -> Any:
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise InputError(f"{origin}: a table is expected", f"[{origin.rsplit(' ', 1)[-1]}]")
        return _build(hint, value, origin)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise InputError(f"{origin}: a list is expected", 'e.g. ["lm_head"]')
        return tuple(_convert(get_args(hint)[0], item, origin) for item in value)
    allowed = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) not in allowed:
        names = " or ".join(item.__name__ for item in allowed if item is not type(None))
        raise InputError(f"{origin} = {value!r}: {names} is expected", "see `quantforge recipes`")
    return value


def to_toml(recipe: Recipe) -> str:
    """Write a recipe as TOML, every key spelled out, in the order of the classes."""
    data = asdict(recipe)
    rules = data.pop("rules")
    tables = {key: data.pop(key) for key in list(data) if isinstance(data[key], dict)}
    lines = _lines(data)
    for rule in rules:
        lines += ["", "[[rule]]", *_lines(rule)]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_lines(table)]
    return "\n".join(lines) + "\n"


def _lines(data: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in data.items() if value is not None]


def _value(value: Any) -> str:
    """Write a value in TOML: a basic string is a JSON string, but for DEL, which JSON does not escape."""
    shown = list(value) if isinstance(value, tuple) else value
    return json.dumps(shown, ensure_ascii=False).replace("\x7f", "\\u007f")
