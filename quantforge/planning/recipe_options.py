"""Build recipes from options: a file, a built-in recipe or the empty one, overridden by options with flat names.

An option is named like its field of `Recipe`; `PLACES` maps the other options to fields of nested tables. The options
of the command line and the keyword arguments of the Python interface have these names.

Built-in recipes are TOML files that begin with ``# description``, ``# quality: ...`` and ``# needs: ...``; engine and
bit width follow from their keys. A quality is the KL divergence from the source in nats per token, measured on a small
model (``docs/results``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from quantforge.arguments import check_names
from quantforge.errors import InputError, UnknownNameError, UsageError, nearest_hint
from quantforge.formats import KEEP
from quantforge.notation import parse_layer
from quantforge.recipe import VALUES, Recipe, Rule, from_toml, read_recipe, value_hint

PLACES: Mapping[str, str] = {
    "adapter": "adapter.source",
    "refine": "gptq.refine",
    "calibration": "calibration.source",
    "samples": "calibration.samples",
    "length": "calibration.length",
    "seed": "calibration.seed",
    "chat_template": "calibration.chat_template",
    "expert_tokens": "calibration.expert_tokens",
    "min_expert_tokens": "calibration.min_expert_tokens",
}
_LEADING_COMMENTS = re.compile(
    r"# (?P<about>.+)\n# quality: (?P<quality>.+)\n# needs: (?P<needs>.+)\n"
)
_SEVERAL_ENGINES = "several"
RecipeSource = Recipe | str | Path | None  # a recipe, its file, the name of a built-in one, or none


class ExportOptions(TypedDict, total=False):
    """Options of an export. None and empty lists leave the recipe as it is."""

    format: str | None
    engine: str | None
    tensor_parallel: int | None
    type: str | None
    pre_tokenizer: str | None
    bits: int | None
    scheme: str | None
    scales: str | None
    ignore: Sequence[str] | None
    rules: Sequence[str | Rule] | None  # PATTERN=SCHEME
    embedding: str | None
    calibration: str | None
    adapter: str | None
    max_shard_bytes: int | None


class RecipeOptions(ExportOptions, total=False):
    """Options that override a recipe; texts are as on the command line."""

    method: str | None
    effort: str | None
    activation_range: str | None
    kv_cache: str | None
    lm_head: str | None
    mtp: str | None
    guided_hessians: int | None
    tune: int | None
    refine: int | None
    samples: int | None
    length: int | None
    seed: int | None
    chat_template: bool | None
    expert_tokens: str | None
    prune_experts: str | None
    sparsity: str | None
    min_expert_tokens: int | None


def place_of(name: str) -> tuple[str, Any]:
    """Return the dotted name of the `Recipe` field that an option sets, and its type.

    Raises:
        UsageError: no option has that name; the nearest one is suggested.
        RuntimeError: the option has that name, but no field of a recipe does (a line of `PLACES` is missing).
    """
    check_names([name], RecipeOptions.__annotations__)
    path = PLACES.get(name, name)
    kind: Any = Recipe
    for field in path.split("."):
        if field not in _types(kind):
            raise RuntimeError(
                f"option '{name}': '{path}' is not a field of Recipe; PLACES in recipe_options.py needs a line for it"
            )
        kind = _types(kind)[field]
    return path, kind


@cache
def _types(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def builtin_recipes() -> dict[str, Path]:
    """Return the paths of the recipes that come with the package, by name."""
    installed = Path(__file__).parent.parent / "recipes"
    folder = installed if installed.is_dir() else Path(__file__).parent.parent.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_recipe(source: RecipeSource) -> Recipe:
    """Return a recipe given as an object, a file or the name of a built-in one; the empty recipe for None.

    Raises:
        InputError: there is neither a file nor a built-in recipe of that name, or it is invalid.
    """
    if source is None or isinstance(source, Recipe):
        return source or Recipe()
    builtin, text = builtin_recipes(), str(source)
    if Path(text).is_file():
        return read_recipe(Path(text))
    if text in builtin:
        return from_toml(builtin[text].read_text(encoding="utf-8"), text)
    raise InputError(
        f"no recipe '{text}': neither a file nor a built-in one", nearest_hint(text, builtin)
    )


def build_recipe(base: RecipeSource, **options: Any) -> Recipe:
    """Load a recipe and override it with options (`RecipeOptions`).

    Raises:
        UsageError: options contradict each other, or there is no option of that name.
        UnknownNameError: an option has a value that no recipe can have.
        InputError: as `load_recipe`.
    """
    recipe = load_recipe(base)
    requested = {
        key: value
        for key, value in options.items()
        if value is not None and not (isinstance(value, (list, tuple)) and not value)
    }
    for key in ("rules", "ignore"):
        if not isinstance(requested.get(key, []), (list, tuple)):
            raise InputError(f"{key} = {requested[key]!r}: a list is expected", 'e.g. ["lm_head"]')
    if not isinstance(requested.get("engine", ""), str):
        raise InputError(f"engine = {requested['engine']!r}: the name of one is expected")
    if "engine" in requested:
        from quantforge.engines import with_engine_defaults

        requested = with_engine_defaults(requested["engine"], requested)
    _check_values(requested)
    width_options = sorted({"bits", "scheme"} & requested.keys())
    if "type" in requested and width_options:
        raise UsageError(
            f"--type and --{width_options[0]} are both given",
            "give one: a type decides every tensor",
        )
    if len(width_options) == 2:
        raise UsageError(
            "--bits and --scheme are both given",
            "give one: --bits N takes the usual scheme of that width, --scheme names any",
        )
    if "rules" in requested:
        requested["rules"] = (*(_rule(text) for text in requested["rules"]), *recipe.rules)
    if "ignore" in requested:
        requested["ignore"] = (*recipe.ignore, *requested["ignore"])
    tables = _group_by_table(requested)
    top_level = tables.pop("")
    try:
        new_tables = {
            name: replace(getattr(recipe, name), **values) for name, values in tables.items()
        }
        result = replace(recipe, **top_level, **new_tables)
    except InputError as error:  # caused by an option: the recipe was valid before
        raise UnknownNameError(error.message, error.hint) from error
    if result.tensor_parallel > 1 and result.engine is None:
        raise UsageError(
            f"--tensor-parallel {result.tensor_parallel}: of which engine", "add --for ENGINE"
        )
    return result


def _group_by_table(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Group option values by table and field of a recipe; those outside of tables under the empty name."""
    tables: dict[str, dict[str, Any]] = {"": {}}
    for name, value in options.items():
        table_name, _, field = place_of(name)[0].rpartition(".")
        tables.setdefault(table_name, {})[field] = value
    if "bits" in tables[""]:
        tables[""]["scheme"] = None
    elif "scheme" in tables[""]:
        tables[""]["bits"] = None
    for name in ("calibration", "adapter"):
        if "source" in (table := tables.get(name, {})):
            table["sha256"] = ()  # the recipe's digests belong to its own files
    return tables


def _check_values(options: Mapping[str, Any]) -> None:
    """Raise `UnknownNameError` for option values that are unknown or not a scheme."""
    for name, value in options.items():
        field = place_of(name)[0]
        known_values = VALUES.get(field, ())
        if known_values and isinstance(value, str) and value.lower() not in known_values:
            option = f"--{name.replace('_', '-')}"
            raise UnknownNameError(f"{option} {value}: unknown", value_hint(field, value))
    schemes = [options.get(name) for name in ("scheme", "lm_head", "embedding")]
    schemes += [_rule(text).scheme for text in options.get("rules", ())]
    for text in schemes:
        if isinstance(text, str) and text != KEEP:
            try:
                parse_layer(text)
            except InputError as error:
                raise UnknownNameError(error.message, error.hint) from error


def _rule(text: str | Rule) -> Rule:
    if isinstance(text, Rule):
        return text
    if not isinstance(text, str):
        raise UsageError(f"rule = {text!r}: PATTERN=SCHEME or a Rule is expected")
    pattern, separator, scheme = text.rpartition("=")
    if not separator or not pattern:
        raise UsageError(
            f"--rule {text}: no scheme", "write --rule 'down_proj=int8:g128:sym' or PATTERN=keep"
        )
    return Rule(pattern, scheme)


@dataclass(frozen=True, slots=True)
class BuiltinRecipe:
    """One built-in recipe, as described by its leading comments and its keys.

    Attributes:
        about: what it is for.
        engine: engine that it is for, or "several".
        bits: bit width.
        quality: measured KL divergence.
        needs: calibration and time that it takes.
    """

    about: str
    engine: str
    bits: int
    quality: str
    needs: str


def described_recipes() -> dict[str, BuiltinRecipe]:
    """Return descriptions of the built-in recipes by name, grouped by engine, by increasing bits."""
    recipes = {name: _describe_recipe(name, path) for name, path in builtin_recipes().items()}
    order = sorted(
        recipes,
        key=lambda name: (
            recipes[name].engine != _SEVERAL_ENGINES,
            recipes[name].engine,
            recipes[name].bits,
            name,
        ),
    )
    return {name: recipes[name] for name in order}


def _describe_recipe(name: str, path: Path) -> BuiltinRecipe:
    text = path.read_text(encoding="utf-8")
    comments = _LEADING_COMMENTS.match(text)
    assert comments is not None, name  # a test reads them all
    recipe = from_toml(text, name)
    return BuiltinRecipe(
        comments["about"],
        recipe.engine or _SEVERAL_ENGINES,
        _bits(recipe),
        comments["quality"],
        comments["needs"],
    )


def _bits(recipe: Recipe) -> int:
    # Imported late: --help does not need it
    from quantforge.formats.gguf.mixture import MIXTURE_BY_BITS

    if recipe.type is not None:
        return next(bits for bits, mixture in MIXTURE_BY_BITS.items() if mixture == recipe.type)
    return recipe.bits or parse_layer(recipe.scheme or "").weight.bits
