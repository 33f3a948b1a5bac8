"""Release files: one model, several recipes, and the quality gates that each result has to pass, read from TOML.

A variant is a recipe (by name, file, or inline) overridden by options. Built-in sets are lists of variants that are
usually published together. Everything that can be checked from the file alone is refused here.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from quantforge.errors import InputError, QuantForgeError, RecipeError, UsageError, nearest_hint
from quantforge.files.hub import is_hub_name
from quantforge.files.opener import FILES
from quantforge.planning.recipe_options import build_recipe, builtin_recipes, load_recipe
from quantforge.recipe import CalibrationOptions, Recipe, build_dataclass, read_toml
from quantforge_files.roles import RECIPE

# A name may not contain .gguf, because files that belong to NAME.gguf are found by that prefix.
NAME = re.compile(r"(?!.*\.gguf(\.|$))[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.IGNORECASE)
REPORTS = {"md": "markdown", "json": "json", "html": "html"}
GGUF_SET = "gguf-ladder"
ALL_SET = "everything"
_SET_TYPES = (
    "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K_M", "IQ4_XS", "Q4_K_M", "Q5_K_M",
    "Q6_K", "Q8_0",
)  # fmt: skip
_EXAMPLE = (
    'e.g. two lines, model = "demo" and sets = ["gguf-ladder"]: it is a release file, in TOML'
)
_GATES = (
    ("max_kl", "kl_mean", "KL divergence {:.4g}, at most {:.4g}"),
    ("max_ppl_increase", "perplexity_increase", "perplexity increased by {:.2%}, at most {:.2%}"),
    ("max_bytes", "weight_bytes", "{} bytes, at most {}"),
)


@dataclass(frozen=True, slots=True)
class Scoring:
    """``[evaluation]``: what is scored, as the options of ``eval``."""

    text: str = ""
    windows: int = 80
    length: int = 512
    # Also measure speed: times, and so the bytes of the report, differ between runs
    speed: bool = False
    reports: tuple[str, ...] = ("md", "json")


@dataclass(frozen=True, slots=True)
class CardFields:
    """``[card]``: fields of model cards and upload commands."""

    base_model: str = ""  # name on the hub; taken from the files if empty
    repository: str = ""  # ORG/NAME, the prefix of the names of all repositories


@dataclass(frozen=True, slots=True)
class QualityGates:
    """``[gates]``: limits that every variant has to meet; gates of a variant override them."""

    max_kl: float | None = None  # nats per token
    max_ppl_increase: float | None = None  # relative to the source: 0.02 is 2 %
    max_bytes: int | None = None  # of the weight files

    @property
    def scored(self) -> tuple[str, ...]:
        """Return the names of the set limits that need a text to be scored."""
        return tuple(n for n in ("max_kl", "max_ppl_increase") if getattr(self, n) is not None)

    def failed(self, metrics: Mapping[str, Any]) -> tuple[str, ...]:
        """Return messages on the limits that measured figures exceed; a figure that is not a number fails."""
        rows = ((getattr(self, name), metrics.get(key), text) for name, key, text in _GATES)
        return tuple(
            "not measured" if value is None else text.format(value, limit)
            for limit, value, text in rows
            if limit is not None and (value is None or not value <= limit)
        )

    def checked(self, origin: str) -> QualityGates:
        """Return the gates; raise `InputError` for a limit that is not a number or whose unit is unclear."""
        for name, value in asdict(self).items():
            if value is not None and not 0 <= value < float("inf"):
                raise InputError(f"{origin}: {name} = {value}: no limit", "a number from 0 on")
        max_increase = self.max_ppl_increase
        if max_increase is not None and max_increase >= 1:
            raise InputError(
                f"{origin}: max_ppl_increase = {max_increase:g}: {max_increase:g}% or {max_increase:.0%}?",
                f"a share below 1: {max_increase / 100:g} is {max_increase:g}%",
            )
        return self

    def over(self, defaults: QualityGates) -> QualityGates:
        """Return these gates, completed by ``defaults`` where these set no limit."""
        set_gates = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(defaults, **set_gates)


@dataclass(frozen=True, slots=True)
class ReleaseVariant:
    """One variant of a release: its name (of the file or folder), its recipe and its gates."""

    name: str
    recipe: Recipe
    gates: QualityGates


@dataclass(frozen=True, slots=True)
class ReleaseSpec:
    """A release: its model, variants, evaluation and card."""

    model: str
    variants: tuple[ReleaseVariant, ...]
    scoring: Scoring
    card: CardFields = field(default_factory=CardFields)

    def only(self, names: Sequence[str]) -> ReleaseSpec:
        """Return the release with only the named variants, or all of them if no name is given.

        Raises:
            UsageError: there is no such variant.
        """
        variant_names = [variant.name for variant in self.variants]
        for name in names:
            if name not in variant_names:
                raise UsageError(
                    f"--only {name}: no variant of the file", nearest_hint(name, variant_names)
                )
        selected = tuple(variant for variant in self.variants if not names or variant.name in names)
        return replace(self, variants=selected)


@dataclass(frozen=True, slots=True)
class _VariantTable:
    """``[[variant]]``: a recipe, its options and gates."""

    name: str = ""
    recipe: str | dict | None = None  # type: ignore[type-arg]
    gates: QualityGates = field(default_factory=QualityGates)
    method: str | None = None
    effort: str | None = None
    bits: int | None = None
    scheme: str | None = None
    format: str | None = None
    type: str | None = None
    engine: str | None = None
    scales: str | None = None


@dataclass(frozen=True, slots=True)
class _ReleaseTables:
    """The top-level tables of a release file; variants are parsed one by one."""

    model: str = ""
    sets: tuple[str, ...] = ()
    variant: tuple[dict, ...] = ()  # type: ignore[type-arg]
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    evaluation: Scoring = field(default_factory=Scoring)
    gates: QualityGates = field(default_factory=QualityGates)
    card: CardFields = field(default_factory=CardFields)


def set_names() -> list[str]:
    """Return the names of all sets: the GGUF ladder, each engine with built-in recipes, and everything."""
    recipes = (load_recipe(name) for name in builtin_recipes())
    return [
        GGUF_SET,
        *sorted({variant_recipe.engine for variant_recipe in recipes if variant_recipe.engine}),
        ALL_SET,
    ]


def variants_of(name: str) -> dict[str, Mapping[str, str]]:
    """Return the options of each variant of a set, by its name.

    Raises:
        InputError: there is no such set.
    """
    if name not in (known_sets := set_names()):
        raise InputError(f"no set '{name}'", nearest_hint(name, known_sets))
    if name == GGUF_SET:
        return {kind: {"type": kind} for kind in _SET_TYPES}
    recipes = {recipe_name: load_recipe(recipe_name) for recipe_name in builtin_recipes()}
    if name != ALL_SET:
        return {
            recipe_name: {"recipe": recipe_name}
            for recipe_name, recipe in recipes.items()
            if recipe.engine == name
        }
    variants, seen_files = variants_of(GGUF_SET), set()
    for recipe_name, recipe in sorted(
        recipes.items(), key=lambda item: not item[0].startswith("vllm")
    ):
        same_files = replace(recipe, engine=None).to_toml()
        if (
            recipe.type is None and same_files not in seen_files
        ):  # engines that take the same file share it
            seen_files.add(same_files)
            variants[recipe_name] = {"recipe": recipe_name}
    return variants


def read_release(path: Path) -> ReleaseSpec:
    """Read a release file.

    Raises:
        InputError: the file cannot be read, or has an unknown key (the nearest one is suggested), an invalid value, a
            gate without an evaluation, or two variants of one name.
        UsageError: options of a variant contradict each other.
    """
    if path.is_dir():
        raise _directory_error(path)
    return parse_release(FILES.text(path, RECIPE, None), str(path))


def _directory_error(path: Path) -> InputError:
    """Return the error for a directory, suggesting the release files in it."""
    files = [path / "release.toml"]
    if not files[0].is_file():
        files = sorted(path.glob("*.toml"))[:3]
    file_list = " or ".join(shlex.quote(str(file)) for file in files)
    hint = f"name the file: {file_list}" if file_list else f"it holds no .toml file; {_EXAMPLE}"
    if (path / "release.json").is_file():
        hint = f"to resume the release in it: {file_list} -o {shlex.quote(str(path))}"
    return InputError("is a directory", hint, subject=str(path))


def parse_release(text: str, origin: str) -> ReleaseSpec:
    """Parse the text of a release file; errors as `read_release`."""
    data = read_toml(text, origin, _EXAMPLE)
    if not isinstance(data.get("variant", []), list):
        raise InputError(f"{origin}: variant: tables are expected", "[[variant]]")
    file: _ReleaseTables = build_dataclass(_ReleaseTables, data, origin)
    if not file.model:
        raise InputError(f"{origin}: 'model' is missing", 'model = "DIR, FILE.gguf or ORG/NAME"')
    scoring = file.evaluation
    for kind in scoring.reports:
        if kind not in REPORTS:
            raise InputError(
                f"{origin}: evaluation: reports: unknown kind '{kind}'", nearest_hint(kind, REPORTS)
            )
    if scoring.windows < 1 or scoring.length < 2:
        raise InputError(f"{origin}: evaluation: nothing to score", "windows from 1, length from 2")
    limits = file.gates.checked(f"{origin}: gates")
    calibration = {key: getattr(file.calibration, key) for key in data.get("calibration", ())}
    variants = tuple(
        _build_variant(row, calibration, limits, origin) for row in _variant_tables(file, origin)
    )
    _check_names(variants, origin)
    if not scoring.text:
        unscored = {name: variant.name for variant in variants for name in variant.gates.scored}
        if unscored or "evaluation" in data:
            names = ", ".join(unscored) or "[evaluation]"
            raise InputError(
                f"{origin}: {names}: no text is scored", '[evaluation] text = "builtin", or a file'
            )
    for key, name in asdict(file.card).items():
        if name and not is_hub_name(name):
            raise InputError(
                f"{origin}: card: {key} = {name!a} is no name of the hub", f'{key} = "ORG/NAME"'
            )
    return ReleaseSpec(file.model, variants, scoring, file.card)


def _variant_tables(file: _ReleaseTables, origin: str) -> list[Mapping[str, Any]]:
    """Return the tables of all variants, those of the sets first."""
    rows: list[Mapping[str, Any]] = []
    stem = Path(file.model.partition("@")[0]).name.removesuffix(".gguf")
    for name in file.sets:
        try:
            variants = variants_of(name)
        except InputError as error:
            raise InputError(f"{origin}: sets: {error.message}", error.hint) from error
        rows += [{"name": f"{stem}-{suffix}", **choices} for suffix, choices in variants.items()]
    rows += file.variant
    if not rows:
        raise InputError(f"{origin}: no variants", 'add [[variant]], or sets = ["gguf-ladder"]')
    return rows


def _build_variant(
    table: Mapping[str, Any], calibration: Mapping[str, Any], gates: QualityGates, origin: str
) -> ReleaseVariant:
    name = table.get("name")
    if name is None:
        raise InputError(
            f"{origin}: a variant without a name", 'name = "demo-Q4_K_M", for instance'
        )
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            f"{origin}: variant: name = {name!r} is no name of a file",
            "letters, digits, . _ - and no .gguf",
        )
    origin = f"{origin}: variant {name}"
    _check_keys(table, origin)
    if not isinstance(table.get("recipe", ""), str | dict):
        raise InputError(f"{origin}: recipe: a name, a file or a table is expected")
    parsed: _VariantTable = build_dataclass(_VariantTable, table, origin)
    choices = {item.name: getattr(parsed, item.name) for item in fields(_VariantTable)[3:]}
    try:
        base: Recipe | str | None
        if isinstance(parsed.recipe, dict):
            _check_keys({key: 0 for key in parsed.recipe if key in _ALLOCATE_KEYS}, "recipe")
            keys = {
                "rules" if key == "rule" else key: value for key, value in parsed.recipe.items()
            }
            base = build_dataclass(Recipe, keys, "recipe")
        else:
            base = parsed.recipe
        recipe = build_recipe(base, **choices)
    except RecipeError as error:
        raise InputError(f"{origin}: {error.message}", error.hint) from error
    except QuantForgeError as error:
        raise type(error)(f"{origin}: {error.message}", error.hint) from error
    recipe = replace(recipe, calibration=replace(recipe.calibration, **calibration))
    return ReleaseVariant(name, recipe, parsed.gates.checked(f"{origin}: gates").over(gates))


# Options of `allocate`, which writes a recipe
_ALLOCATE_KEYS = frozenset({"target", "like", "candidates"})


def _check_keys(table: Mapping[str, Any], origin: str) -> None:
    """Refuse keys of a variant that belong to its recipe or to `allocate`, with a hint on what to write."""
    for key in table.keys() - {item.name for item in fields(_VariantTable)}:
        hint = f"{key} is of the recipe: recipe = {{{key} = ...}}"
        if key in _ALLOCATE_KEYS:
            hint = f'quantforge allocate MODEL --{key} ... -o mixture.toml, then recipe = "mixture.toml"'
        if key in _ALLOCATE_KEYS or key in {item.name for item in fields(Recipe)}:
            raise InputError(f"{origin}: unknown key '{key}'", hint)


def _check_names(variants: Sequence[ReleaseVariant], origin: str) -> None:
    """Refuse variant names that occur twice, ignoring case: some file systems do."""
    name_counts = Counter(variant.name.lower() for variant in variants)
    duplicate_names = sorted(name for name, count in name_counts.items() if count > 1)
    if duplicate_names:
        raise InputError(
            f"{origin}: several variants are called {', '.join(duplicate_names)}",
            "give each its own name",
        )
