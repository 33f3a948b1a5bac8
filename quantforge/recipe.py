"""The recipe: the user's choices as typed data, read from and written to TOML.

A recipe holds intent only; the plan decides. Every key has one meaning and a default, an unknown key is an error that
suggests the nearest one, and ``from_toml(recipe.to_toml()) == recipe``. Every table of a recipe is validated when it is
created, whether it comes from a file or a program. Files are read with limits on size and depth.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from quantforge.arguments import strict_fields
from quantforge.errors import InputError, RecipeError, nearest_hint
from quantforge.files.opener import FILES
from quantforge.grids import INTEGER_BITS
from quantforge.notation import parse_share, parse_sparsity
from quantforge.scheme import Sparsity
from quantforge_files.roles import RECIPE

# Smallest and largest values of numbers; more sweeps would only waste time.
LIMITS = {
    "bits": (min(INTEGER_BITS), max(INTEGER_BITS)),
    "guided_hessians": (0, 1024),
    "tune": (0, 1000),
    "gptq.shrinkage": (0, 1),
    "gptq.refine": (0, 1000),
    "gptq.passes": (0, 1000),
    "tensor_parallel": (1, 2**20),
    "awq.search_samples": (1, 2**40),
    "calibration.samples": (1, 2**32),
    "calibration.length": (2, 2**32),
    "calibration.random_share": (0, 1),
    "calibration.seed": (-(2**63), 2**63 - 1),
    "calibration.micro_batch": (1, 2**32),
    "calibration.min_expert_tokens": (0, 2**32),
    "max_shard_bytes": (1, 2**60),
}
# Allowed values of keys with a fixed set; the first is not always the default.
VALUES = {
    "effort": ("low", "medium", "high"),
    "scales": ("absmax", "search", "reference"),
    "activation_range": ("absmax", "percentile", "mse"),
    "kv_cache": ("none", "fp8", "fp8_head"),
    "mtp": ("keep", "quantize", "drop"),
    "calibration.precision": ("float32", "bfloat16"),
    "calibration.expert_tokens": ("routed", "all"),
}
# Hints for values of other options, in the form that `nearest_hint` takes: types of the cache at run time.
OTHER_TOOLS_VALUES = {
    "kv_cache": {
        "int8 int4 16bit": "files hold scales of fp8 alone; --cache of generate, serve and eval takes other kinds",
    }
}
# Keys whose values are converted to lower case.
LOWER_CASE_KEYS = (
    "method",
    "effort",
    "format",
    "engine",
    "scales",
    "activation_range",
    "kv_cache",
    "mtp",
)
IMATRIX = "imatrix:"  # prefix of a calibration source: importance is read from the named file
NO_DATA = "none"  # calibration source for no calibration at all


@strict_fields
@dataclass(frozen=True, slots=True)
class GptqOptions:
    """``[gptq]``: see `quantforge.quantizers.gptq.gptq`."""

    damping: float = 0.01  # of the mean of the Hessian's diagonal
    # Share of the Hessian's diagonal that is added to it; None: as the grid has it
    shrinkage: float | None = None
    refine: int = 2  # sweeps of coordinate descent over the codes, a refit of the scales after each
    passes: int = 0  # of error feedback, each with scales fitted to what the last one rounded; 0: as the grid has it

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.damping < 1:
            raise RecipeError(f"gptq.damping = {self.damping}", "between 0 and 1, e.g. 0.01")

    def passes_of(self, grid: int) -> int:
        """Return the number of passes over the columns: `passes`, or that of the ``grid`` if `passes` is 0."""
        return self.passes or (grid if self.refine else 1)


@strict_fields
@dataclass(frozen=True, slots=True)
class AwqOptions:
    """``[awq]``: see `quantforge.quantizers.awq`."""

    search_samples: int = 16  # calibration rows that the search compares outputs on

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Rounding:
    """The part of a recipe that methods use: how scales are chosen, and the options of each method.

    Every field has the name of the field of `Recipe` that it is copied from.
    """

    scales: str = "search"  # as of `Recipe`
    gptq: GptqOptions = field(default_factory=GptqOptions)
    awq: AwqOptions = field(default_factory=AwqOptions)

    @property
    def weighs(self) -> bool:
        """Return whether scales are chosen with the importance of columns, if it is known."""
        return self.scales != "absmax"


@strict_fields
@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """``[calibration]``: the source of the text and how it is cut into rows."""

    source: str = "builtin"
    samples: int = 128  # rows
    length: int = 512  # tokens of a row
    seed: int = 0
    # Share of the rows whose tokens are drawn at random, see `planning.calibration_rows`
    random_share: float | None = None
    chat_template: bool = False  # render `messages` documents through the model's chat template
    micro_batch: int = 2  # rows of one forward; part of the recipe because sums depend on it
    precision: str = "float32"  # of the products of the forward: float32 | bfloat16, twice as fast where it is native
    expert_tokens: str = "routed"  # tokens that calibrate an expert: those sent to it | all
    min_expert_tokens: int = 128  # of an expert that saw fewer an event tells
    sha256: tuple[str, ...] = ()  # `DIGEST  NAME` of the source's files, see `planning.local_paths`

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def importance_file(self) -> str | None:
        """Return the name of the importance file, None if importance is not read from a file."""
        file_name = self.source.removeprefix(IMATRIX)
        return None if file_name == self.source else file_name

    @property
    def writes_own_text(self) -> bool:
        """Return whether the model generates calibration text (the source ``self``, alone or in a mixture)."""
        sources = self.source.split(",")
        return any(source.partition("=")[0].strip() == "self" for source in sources)


@strict_fields
@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """``[adapter]``: the LoRA adapter that is merged into the source first; see `formats.sources.adapter`."""

    source: str = ""  # its directory; none when empty
    sha256: tuple[str, ...] = ()  # `DIGEST  NAME` of its files, see `planning.local_paths`

    def __post_init__(self) -> None:
        check_fields(self)


@strict_fields
@dataclass(frozen=True, slots=True)
class Rule:
    """``[[rule]]``: the scheme of the tensors that a pattern matches (``keep`` leaves them unquantized)."""

    match: str
    scheme: str

    def __post_init__(self) -> None:
        check_fields(self)


@strict_fields
@dataclass(frozen=True, slots=True)
class Recipe:
    """The choices that decide the result. ``bits`` suffices for most users; ``scheme`` is the full form."""

    method: str = ""  # "": what measured best (`planning.effort.choose_method`)
    effort: str = "medium"  # low | medium | high: what is left at its default for time or quality (`planning.effort`)
    bits: int | None = None
    scheme: str | None = None
    format: str = ""  # "": by name, type, engine or scheme (`formats.format_choice`)
    scales: str = "search"  # absmax | search | reference (ggml's own quantizer)
    # Hessians per matrix, each for a strip of its rows; 0: a plain one; None: by effort
    guided_hessians: int | None = None
    tune: int | None = None  # epochs in which scales, norms and codes are learned; None: by effort
    ignore: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    activation_range: str = "absmax"  # range of static inputs: absmax | percentile | mse
    kv_cache: str = "none"  # measured scales of an fp8 cache: none | fp8 (per tensor) | fp8_head
    engine: str | None = None  # that has to load the result
    tensor_parallel: int = 1  # devices that it is split over
    lm_head: str = "keep"  # scheme of the output projection, or keep
    embedding: str = ""  # its scheme, or keep; "": as the tool of the format has it
    mtp: str = "keep"  # heads that predict further tokens: keep | quantize (plainly) | drop
    max_shard_bytes: int | None = None  # None: 5 GB for safetensors, one file for GGUF
    type: str | None = None  # GGUF: the mixture, e.g. Q4_K_M
    # GGUF: llama.cpp's name of a pre-tokenizer that is not recognised
    pre_tokenizer: str | None = None
    prune_experts: str | None = None  # the share of every layer's experts that is removed: "25%"
    sparsity: str | None = None  # zeros of every row: a share, or how many of neighbours stay
    adapter: AdapterOptions = field(default_factory=AdapterOptions)
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    gptq: GptqOptions = field(default_factory=GptqOptions)
    awq: AwqOptions = field(default_factory=AwqOptions)

    def __post_init__(self) -> None:
        for name in LOWER_CASE_KEYS:
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, value.lower())
        check_fields(self)
        if self.prune_experts is not None:
            parse_share(self.prune_experts, "prune_experts")
        self.zeros  # noqa: B018 - raises
        if self.bits is not None and self.scheme is not None:
            raise RecipeError("'bits' and 'scheme' are both given", "--bits or --scheme")
        if self.type is not None and (self.bits is not None or self.scheme is not None):
            message = "'type' is given beside 'bits' or 'scheme'"
            raise RecipeError(message, "a type decides every tensor")

    @property
    def zeros(self) -> Sparsity | None:
        """Return the sparsity of the weights, None if there is none; errors as `parse_sparsity`."""
        return None if self.sparsity is None else parse_sparsity(self.sparsity)

    @property
    def rounding(self) -> Rounding:
        """Return the part of the recipe that methods use."""
        return Rounding(**{item.name: getattr(self, item.name) for item in fields(Rounding)})

    def to_toml(self) -> str:
        """Return the recipe as TOML with every key, in the order of the classes."""
        data = asdict(self)
        rules = data.pop("rules")
        tables = {key: data.pop(key) for key in list(data) if isinstance(data[key], dict)}
        toml_lines = _toml_lines(data)
        for rule in rules:
            toml_lines += ["", "[[rule]]", *_toml_lines(rule)]
        for name, table in tables.items():
            toml_lines += ["", f"[{name}]", *_toml_lines(table)]
        return "\n".join(toml_lines) + "\n"


def from_toml(text: str, origin: str = "recipe") -> Recipe:
    """Parse a recipe.

    Raises:
        InputError: the text is not TOML, has an unknown key (the nearest one is suggested), or a value of the wrong
            type.
    """
    data = read_toml(text, origin)
    if "rules" in data:
        raise InputError(f"{origin}: unknown key 'rules'", "did you mean '[[rule]]'?")
    if "rule" in data:
        data["rules"] = data.pop("rule")
    try:
        recipe: Recipe = build_dataclass(Recipe, data, origin)
    except RecipeError as error:
        raise InputError(f"{origin}: {error.what}", error.hint) from None
    return recipe


def read_recipe(path: Path) -> Recipe:
    """Read a recipe file; errors as `Opener.text` and `from_toml`."""
    return from_toml(FILES.text(path, RECIPE, None), str(path))


# ---- checks of fields


def value_hint(name: str, value: object) -> str:
    """Return what to type instead of a value that a key does not allow."""
    known_values, other_tools = VALUES[name], OTHER_TOOLS_VALUES.get(name, {})
    text = str(value).lower()
    if other_tools and "," in text:  # of keys, and of values
        return next(iter(other_tools.values()))
    return nearest_hint(text, known_values, other_tools)


def check_fields(options: Any) -> None:
    """Validate types, values and ranges of a table of a recipe when it is created.

    Args:
        options: the table's dataclass, such as ``CalibrationOptions``, or the ``Recipe`` itself.

    Raises:
        InputError: naming the field, and what it allows.
    """
    table = type(options).__name__.removesuffix("Options").lower()
    table = "" if table == "recipe" else table
    kind: Any = type(options)
    hints = _hints(kind)
    for item in fields(options):
        origin = f"{table}: {item.name}" if table else item.name
        try:
            _check_type(hints[item.name], getattr(options, item.name), origin)
        except InputError as error:
            raise RecipeError(error.message, error.hint) from None
    for name, allowed_values in VALUES.items():
        value_table, _, key = name.rpartition(".")
        if value_table == table and (value := getattr(options, key)) not in allowed_values:
            raise RecipeError(f"{name} = {value!r}", value_hint(name, value))
    for name, (minimum, maximum) in LIMITS.items():
        value_table, _, key = name.rpartition(".")
        value = getattr(options, key) if value_table == table else None
        if value is not None and not minimum <= value <= maximum:
            size = "small" if value < minimum else "large"
            raise RecipeError(f"{name} = {value} is too {size}", f"from {minimum} to {maximum}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _check_type(hint: Any, value: Any, origin: str) -> None:
    """Refuse a value that does not have a type; errors as `_convert_value`."""
    if is_dataclass(hint):
        if not isinstance(value, hint):  # type: ignore[arg-type]
            raise InputError(f"{origin} = {value!r}: {hint.__name__} is expected")  # type: ignore[union-attr]
    elif get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            raise InputError(f"{origin} = {value!r}: a tuple is expected")
        for item in value:
            _check_type(get_args(hint)[0], item, origin)
    else:
        _convert_value(hint, value, origin)


# ---- TOML

# Parsing a key takes quadratic time in its parts; lines are measured without their strings.
MAX_KEY_PARTS, MAX_LINE = 32, 20_000
_MAX_SHOWN = 60  # characters of a value in a message
# Strings and comments of TOML. No alternative fails once it has begun, so matching takes linear time.
_STRING = re.compile(
    r'''"""(?:[^"\\]+|\\[\s\S]|"(?!""))*(?:"""|\Z|\\)'''
    r"""|'''(?:[^']+|'(?!''))*(?:'''|\Z)"""
    r"""|"(?:[^"\\\n]+|\\[^\n])*(?:"|\n|\Z|\\)"""
    r"""|'[^'\n]*(?:'|\n|\Z)|\#[^\n]*"""
)


def _strip_strings(text: str) -> str:
    """Remove strings and comments from TOML, so that the rest of a valid recipe has short lines and few dots."""
    return _STRING.sub("", text)


_PYTHON_BOOLEAN = re.compile(r"=\s*(True|False)\b")
_EXAMPLES = {str: '"text"', int: "4", float: "0.5", bool: "true"}


def read_toml(
    text: str, origin: str, example: str = "see `quantforge recipes` for examples"
) -> dict[str, Any]:
    """Parse the TOML of a recipe without validating it.

    Raises:
        InputError: it is not TOML (``example`` is the hint), or larger or deeper than any recipe.
    """
    if len(text) > RECIPE.max_bytes or any(
        line.count(".") > MAX_KEY_PARTS or len(line) > MAX_LINE
        for line in _strip_strings(text).splitlines()
    ):
        raise InputError(f"{origin}: no recipe is that large", example)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits
        if match := _PYTHON_BOOLEAN.search(_strip_strings(text)):
            example = f"TOML writes {match[1].lower()}, not {match[1]}"
        raise InputError(f"{origin}: not TOML: {error}", example) from error


def build_dataclass(kind: type[Any], data: Mapping[str, Any], origin: str) -> Any:
    """Return an instance of a dataclass with the values of a TOML table.

    Raises:
        InputError: a key is unknown or missing, or a value has the wrong type; ``origin`` says where.
    """
    hints = get_type_hints(kind)
    field_names = {item.name for item in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in field_names:
            names = {"rule" if name == "rules" else name for name in field_names}
            raise InputError(f"{origin}: unknown key '{key}'", nearest_hint(key, names))
        values[key] = _convert_value(hints[key], value, f"{origin}: {key}")
    for item in fields(kind):
        needed = item.default is MISSING and item.default_factory is MISSING
        if needed and item.name not in values:
            raise InputError(
                f"{origin}: '{item.name}' is missing", "a rule has `match` and `scheme`"
            )
    return kind(**values)


def _convert_value(hint: Any, value: Any, origin: str) -> Any:
    """Convert a TOML value to the type of a field; errors as `build_dataclass`."""
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise InputError(f"{origin}: a table is expected", f"[{origin.rsplit(' ', 1)[-1]}]")
        return build_dataclass(hint, value, origin)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise InputError(f"{origin}: a list is expected", 'e.g. ["lm_head"]')
        return tuple(_convert_value(get_args(hint)[0], item, origin) for item in value)
    allowed_types = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if float in allowed_types and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) not in allowed_types:
        names = " or ".join(item.__name__ for item in allowed_types if item is not type(None))
        example = next((text for kind, text in _EXAMPLES.items() if kind in allowed_types), "")
        example_text = f"e.g. {origin.rsplit(' ', 1)[-1]} = {example}"
        raise InputError(f"{origin} = {value!r}: {names} is expected", example_text)
    return value


def recipe_differences(first_text: str, second_text: str) -> list[str]:
    """Return the keys in which two recipes differ, each with both values; ``recipe`` if one cannot be read."""
    try:
        flat_recipes = [
            _flatten(read_toml(text, "recipe"), "") for text in (first_text, second_text)
        ]
    except InputError:
        return ["recipe"]
    lines = []
    for key in dict.fromkeys(key for values in flat_recipes for key in values):
        values = [values.get(key, "unset") for values in flat_recipes]
        if values[0] != values[1]:
            lines.append(key if key.endswith("sha256") else difference_line(key, *values))
    return lines


def difference_line(key: str, first_value: str, second_value: str) -> str:
    """Return a line about a key whose value differs between an existing result and the request."""
    return f"{key}: {_shorten(first_value)} there, {_shorten(second_value)} here"


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _flatten(table: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Return the values of nested tables as text, by dotted keys."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = (value or '""') if isinstance(value, str) else json.dumps(value)
    return flat


def _toml_lines(data: Mapping[str, Any]) -> list[str]:
    """Return the TOML lines of a table, without keys whose value is None."""
    return [f"{key} = {_toml_value(value)}" for key, value in data.items() if value is not None]


def _toml_value(value: Any) -> str:
    """Return a value as TOML: a basic string is a JSON string, except that DEL has to be escaped."""
    json_value = list(value) if isinstance(value, tuple) else value
    return json.dumps(json_value, ensure_ascii=False).replace("\x7f", "\\u007f")
