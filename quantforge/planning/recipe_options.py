"""Recipes by options: a file, a built-in recipe or the empty one, overridden by choices under flat names.

A choice bears the name of its field of `Recipe`; `PLACES` says which field of which table the others stand for. The
options of the command line and the keywords of the Python interface are these names.

Built-in recipes are TOML files that begin with ``# what it is``, ``# quality: ...`` and ``# needs: ...``; engine and
width follow from their keys. A quality is a KL divergence from the source in nats per token, measured on a small model
(``docs/results``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from quantforge.arguments import check_names
from quantforge.errors import InputError, UnknownNameError, UsageError, nearest
from quantforge.formats import KEEP
from quantforge.notation import parse_layer
from quantforge.recipe import VALUES, Recipe, Rule, from_toml, hint_of, read_recipe

PLACES: Mapping[str, str] = {
    "adapter": "adapter.source",
    "refine": "gptq.refine",
    "calibration": "calibration.source",
    "samples": "calibration.samples",
    "length": "calibration.length",
    "seed": "calibration.seed",
    "chat_template": "calibration.chat_template",
    "experts": "calibration.experts",
    "min_expert_tokens": "calibration.min_expert_tokens",
}
_HEAD = re.compile(r"# (?P<about>.+)\n# quality: (?P<quality>.+)\n# needs: (?P<needs>.+)\n")
_SEVERAL = "several"
RecipeSource = Recipe | str | Path | None  # a recipe, its file, the name of a built-in one, or none


class ExportOptions(TypedDict, total=False):
    """Choices of an export, which rounds plainly what it rounds. None and empty ones leave the recipe as it is."""

    format: str | None
    engine: str | None
    tensor_parallel: int | None
    type: str | None
    pre: str | None
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
    """Choices that override a recipe; texts are as on the command line."""

    method: str | None
    effort: str | None
    inputs: str | None
    kv_cache: str | None
    head: str | None
    mtp: str | None
    guide: int | None
    tune: int | None
    refine: int | None
    samples: int | None
    length: int | None
    seed: int | None
    chat_template: bool | None
    experts: str | None
    prune_experts: str | None
    sparsity: str | None
    min_expert_tokens: int | None


def place_of(name: str) -> tuple[str, Any]:
    """Return the dotted name of the field of `Recipe` that a choice stands for, and its type.

    Raises:
        UsageError: no choice has that name; the nearest one is told.
    """
    check_names([name], RecipeOptions.__annotations__)
    place = PLACES.get(name, name)
    owner: Any = Recipe
    *tables, field = place.split(".")
    for table in tables:
        owner = _types(owner)[table]
    return place, _types(owner)[field]


@cache
def _types(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def builtin_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package, by name."""
    package = Path(__file__).parent.parent / "recipes"
    folder = package if package.is_dir() else Path(__file__).parent.parent.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_recipe(named: RecipeSource) -> Recipe:
    """Return a recipe: itself, from a file, or a built-in one; the empty one for None.

    Raises:
        InputError: there is neither a file nor a built-in recipe of that name, or it is not valid.
    """
    if named is None or isinstance(named, Recipe):
        return named or Recipe()
    known, text = builtin_recipes(), str(named)
    if Path(text).is_file():
        return read_recipe(Path(text))
    if text in known:
        return from_toml(known[text].read_text(encoding="utf-8"), text)
    raise InputError(f"no recipe '{text}': neither a file nor a built-in one", nearest(text, known))


def build_recipe(base: RecipeSource, **options: Any) -> Recipe:
    """Override a recipe by choices (`RecipeOptions`).

    Raises:
        UsageError: choices contradict each other, or there is none of that name.
        UnknownNameError: a value that no recipe may have.
        InputError: as `load_recipe`.
    """
    recipe = load_recipe(base)
    given = {
        key: value
        for key, value in options.items()
        if value is not None and not (isinstance(value, (list, tuple)) and not value)
    }
    for key in ("rules", "ignore"):
        if not isinstance(given.get(key, []), (list, tuple)):
            raise InputError(f"{key} = {given[key]!r}: a list is expected", 'e.g. ["lm_head"]')
    if not isinstance(given.get("engine", ""), str):
        raise InputError(f"engine = {given['engine']!r}: the name of one is expected")
    if "engine" in given:
        from quantforge.engines import with_engine_defaults

        given = with_engine_defaults(given["engine"], given)
    _check_words(given)
    beside = sorted({"bits", "scheme"} & given.keys())
    if "type" in given and beside:
        raise UsageError(
            f"--type and --{beside[0]} are both given", "give one: a type decides every tensor"
        )
    if len(beside) == 2:
        raise UsageError(
            "--bits and --scheme are both given",
            "give one: --bits N takes the usual scheme of that width, --scheme names any",
        )
    if "rules" in given:
        given["rules"] = (*(_rule(text) for text in given["rules"]), *recipe.rules)
    if "ignore" in given:
        given["ignore"] = (*recipe.ignore, *given["ignore"])
    tables = _by_table(given)
    top = tables.pop("")
    try:
        inner = {name: replace(getattr(recipe, name), **values) for name, values in tables.items()}
        made = replace(recipe, **top, **inner)
    except InputError as error:  # not of the recipe, which was one before
        raise UnknownNameError(error.message, error.hint) from error
    if made.tensor_parallel > 1 and made.engine is None:
        raise UsageError(
            f"--tensor-parallel {made.tensor_parallel}: of which engine", "add --for ENGINE"
        )
    return made


def _by_table(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the values of choices by table and field of a recipe; those of no table under the empty name."""
    tables: dict[str, dict[str, Any]] = {"": {}}
    for name, value in given.items():
        inside, _, field = place_of(name)[0].rpartition(".")
        tables.setdefault(inside, {})[field] = value
    if "bits" in tables[""]:
        tables[""]["scheme"] = None
    elif "scheme" in tables[""]:
        tables[""]["bits"] = None
    for name in ("calibration", "adapter"):
        if "source" in (table := tables.get(name, {})):
            table["sha256"] = ()  # those of a recipe are of its own files
    return tables


def _check_words(given: Mapping[str, Any]) -> None:
    """Refuse words that an option does not take and texts that are no scheme, as `UnknownNameError`."""
    for name, value in given.items():
        field = place_of(name)[0]
        known = VALUES.get(field, ())
        if known and isinstance(value, str) and value.lower() not in known:
            option = f"--{name.replace('_', '-')}"
            raise UnknownNameError(f"{option} {value}: unknown", hint_of(field, value))
    schemes = [given.get(name) for name in ("scheme", "head", "embedding")]
    schemes += [_rule(text).scheme for text in given.get("rules", ())]
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
    """One built-in recipe: what its first lines say, and what its keys mean."""

    about: str
    engine: str
    bits: int
    quality: str
    needs: str


def described_recipes() -> dict[str, BuiltinRecipe]:
    """Return the built-in recipes by name, those of one engine together, from few bits to many."""
    found = {name: _described(name, path) for name, path in builtin_recipes().items()}
    order = sorted(
        found,
        key=lambda name: (
            found[name].engine != _SEVERAL,
            found[name].engine,
            found[name].bits,
            name,
        ),
    )
    return {name: found[name] for name in order}


def _described(name: str, path: Path) -> BuiltinRecipe:
    text = path.read_text(encoding="utf-8")
    head = _HEAD.match(text)
    assert head is not None, name  # a test reads them all
    recipe = from_toml(text, name)
    return BuiltinRecipe(
        head["about"],
        recipe.engine or _SEVERAL,
        _bits(recipe),
        head["quality"],
        head["needs"],
    )


def _bits(wanted: Recipe) -> int:
    from quantforge.formats.gguf.mixture import MIXTURE_BY_BITS  # which --help does without

    if wanted.type is not None:
        return next(bits for bits, mixture in MIXTURE_BY_BITS.items() if mixture == wanted.type)
    return wanted.bits or parse_layer(wanted.scheme or "").weight.bits
