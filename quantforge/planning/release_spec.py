"""Release file: one model, many recipes, and what has to hold of each result, as typed data out of TOML.

A variant is a recipe, by name, file or in place, overridden by choices. Built-in sets are lists of variants that people
publish together. Whatever can be known from the file alone is refused here, and every fault of a kind is named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.hub import is_hub_name
from quantforge.checkpoint.recipe_toml import built, read_toml
from quantforge.errors import InputError, QuantForgeError, UsageError, nearest
from quantforge.planning.quality_gates import QualityGates, checked
from quantforge.planning.recipe_options import build_recipe
from quantforge.planning.release_directory import EXAMPLE, is_directory
from quantforge.planning.release_sets import variants_of
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge_files.roles import RECIPE

# No name begins like the files beside NAME.gguf, which lists and uploads take by their first letters.
NAME = re.compile(r"(?!.*\.gguf(\.|$))[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.IGNORECASE)
REPORTS = {"md": "markdown", "json": "json", "html": "html"}


@dataclass(frozen=True, slots=True)
class Scoring:
    """``[evaluation]``: what is scored, as the options of ``eval``."""

    text: str = ""
    windows: int = 80
    length: int = 512
    speed: bool = False  # times differ from run to run, and so do the bytes of a report with them
    reports: tuple[str, ...] = ("md", "json")


@dataclass(frozen=True, slots=True)
class CardFields:
    """``[card]``: what cards and upload commands say."""

    base_model: str = ""  # on the hub; as the files say when empty
    repository: str = ""  # ORG/NAME, whose name the repositories of the folders begin with


@dataclass(frozen=True, slots=True)
class ReleaseVariant:
    """A variant: a name, which becomes that of its file or folder, the recipe, and its limits."""

    name: str
    recipe: Recipe
    gates: QualityGates


@dataclass(frozen=True, slots=True)
class _Choices:
    """``[[variant]]`` beside ``recipe`` and ``gates``."""

    name: str = ""
    method: str | None = None
    effort: str | None = None
    bits: int | None = None
    scheme: str | None = None
    format: str | None = None
    type: str | None = None
    engine: str | None = None
    scales: str | None = None


@dataclass(frozen=True, slots=True)
class ReleaseSpec:
    """A release: its model, variants, text and card."""

    model: str
    variants: tuple[ReleaseVariant, ...]
    scoring: Scoring
    card: CardFields = field(default_factory=CardFields)

    def only(self, names: Sequence[str]) -> ReleaseSpec:
        """Return the release with the variants of these names alone; all for none.

        Raises:
            UsageError: there is no such variant.
        """
        known = [variant.name for variant in self.variants]
        for name in names:
            if name not in known:
                raise UsageError(f"--only {name}: no variant of the file", nearest(name, known))
        chosen = tuple(one for one in self.variants if not names or one.name in names)
        return replace(self, variants=chosen)


_SIZES = frozenset({"target", "like", "candidates"})  # choices of `allocate`, which writes a recipe
_KEYS = ("model", "sets", "variant", "calibration", "evaluation", "gates", "card")


def read_release(path: Path) -> ReleaseSpec:
    """Read a release file.

    Raises:
        InputError: it cannot be read, an unknown key (the nearest one is named), a value that means nothing, a gate
            that nothing evaluates, two variants of one name.
        UsageError: choices of a variant contradict each other.
    """
    if path.is_dir():
        raise is_directory(path)
    return release_of(FILES.text(path, RECIPE, None), str(path))


def release_of(text: str, origin: str) -> ReleaseSpec:
    """Return the release that a text states; errors as `read_release`."""
    data = read_toml(text, origin, EXAMPLE)
    for key in data:
        if key not in _KEYS:
            raise InputError(f"{origin}: unknown key '{key}'", nearest(key, _KEYS))
    if not isinstance(data.get("model"), str) or not data["model"]:
        raise InputError(f"{origin}: 'model' is missing", 'model = "DIR, FILE.gguf or ORG/NAME"')
    scoring = _table(Scoring, data, "evaluation", origin)
    for kind in scoring.reports:
        if kind not in REPORTS:
            raise InputError(
                f"{origin}: evaluation: reports: unknown kind '{kind}'", nearest(kind, REPORTS)
            )
    if scoring.windows < 1 or scoring.length < 2:
        raise InputError(f"{origin}: evaluation: nothing to score", "windows from 1, length from 2")
    limits = checked(_table(QualityGates, data, "gates", origin), f"{origin}: gates")
    rows = _rows(data, origin)
    variants = tuple(_variant(row, data.get("calibration", {}), limits, origin) for row in rows)
    _check_names(variants, origin)
    if not scoring.text:
        stated = {n: one.name for one in variants for n in one.gates.scored}
        if stated or "evaluation" in data:
            names = ", ".join(stated) or "[evaluation]"
            raise InputError(
                f"{origin}: {names}: no text is scored", '[evaluation] text = "builtin", or a file'
            )
    card = _table(CardFields, data, "card", origin)
    for key, stated in asdict(card).items():
        if stated and not is_hub_name(stated):
            raise InputError(
                f"{origin}: card: {key} = {stated!a} is no name of the hub", f'{key} = "ORG/NAME"'
            )
    return ReleaseSpec(data["model"], variants, scoring, card)


def _table(kind: type[Any], data: Mapping[str, Any], name: str, origin: str) -> Any:
    value = data.get(name, {})
    if not isinstance(value, Mapping):
        raise InputError(f"{origin}: {name}: a table is expected", f"[{name}]")
    return built(kind, value, f"{origin}: {name}")


def _rows(data: Mapping[str, Any], origin: str) -> list[Mapping[str, Any]]:
    """Return the tables of all variants, those of the sets first."""
    sets, own = data.get("sets", []), data.get("variant", [])
    if not isinstance(sets, list):
        raise InputError(f"{origin}: sets: a list is expected", 'sets = ["gguf-ladder"]')
    if not isinstance(own, list) or not all(isinstance(row, Mapping) for row in own):
        raise InputError(f"{origin}: variant: tables are expected", "[[variant]]")
    rows: list[Mapping[str, Any]] = []
    stem = Path(data["model"].partition("@")[0]).name.removesuffix(".gguf")
    for name in sets:
        try:
            found = variants_of(str(name))
        except InputError as error:
            raise InputError(f"{origin}: sets: {error.message}", error.hint) from error
        rows += [{"name": f"{stem}-{one}", **choices} for one, choices in found.items()]
    rows += own
    if not rows:
        raise InputError(f"{origin}: no variants", 'add [[variant]], or sets = ["gguf-ladder"]')
    return rows


def _variant(
    row: Mapping[str, Any], calibration: Mapping[str, Any], limits: QualityGates, origin: str
) -> ReleaseVariant:
    name = row.get("name")
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
    known = {item.name for item in fields(_Choices)}
    for key in row:
        if key not in {*known, "recipe", "gates"}:
            raise InputError(f"{origin}: unknown key '{key}'", _instead(key, row[key], known))
    choices = built(_Choices, {key: row[key] for key in row if key in known}, origin)
    base = row.get("recipe")
    if isinstance(base, Mapping):
        given = {"rules" if key == "rule" else key: value for key, value in base.items()}
        for key in _SIZES & given.keys():
            raise InputError(
                f"{origin}: recipe: unknown key '{key}'", _instead(key, given[key], known)
            )
        try:
            base = built(Recipe, given, f"{origin}: recipe")
        except QuantForgeError as error:
            said = error.message.removeprefix(f"{origin}: ")
            raise type(error)(f"{origin}: {said}", error.hint) from error
    elif base is not None and not isinstance(base, str):
        raise InputError(f"{origin}: recipe: a name, a file or a table is expected")
    given = {key: getattr(choices, key) for key in known - {"name"}}
    try:
        recipe = build_recipe(base, **given)
    except QuantForgeError as error:
        raise type(error)(f"{origin}: {error.message}", error.hint) from error
    if not isinstance(calibration, Mapping):
        raise InputError(f"{origin}: calibration: a table is expected", "[calibration]")
    text = built(CalibrationOptions, calibration, "calibration")
    stated = {key: getattr(text, key) for key in calibration}
    recipe = replace(recipe, calibration=replace(recipe.calibration, **stated))
    own = checked(_table(QualityGates, row, "gates", origin), f"{origin}: gates")
    merged = {
        item.name: getattr(limits, item.name) if value is None else value
        for item in fields(QualityGates) for value in [getattr(own, item.name)]
    }  # fmt: skip
    return ReleaseVariant(name, recipe, QualityGates(**merged))


def _instead(key: str, value: object, known: Collection[str]) -> str:
    """Return what is typed instead of a key that a variant has not."""
    if key in _SIZES:
        what = f"--{key} {value}" if key != "candidates" else "--target SIZE --candidates ..."
        return f'quantforge allocate MODEL {what} -o mixture.toml, then recipe = "mixture.toml"'
    if key in {item.name for item in fields(Recipe)}:
        return f"{key} is of the recipe: recipe = {{{key} = ...}}"
    return nearest(key, {*known, "recipe", "gates"})


def _check_names(variants: Sequence[ReleaseVariant], origin: str) -> None:
    """Refuse names that occur more than once, also where only letters' case differs: file systems may not see it."""
    counted = Counter(one.name.lower() for one in variants)
    twice = sorted(name for name, times in counted.items() if times > 1)
    if twice:
        raise InputError(
            f"{origin}: several variants are called {', '.join(twice)}", "give each its own name"
        )
