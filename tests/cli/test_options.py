"""Options of the command line: each is written once, stands for a field of the recipe, and is documented."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, make_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import typer

from quantforge import recipe
from quantforge.api import export
from quantforge.cli import choices
from quantforge.cli.app import app
from quantforge.errors import UsageError
from quantforge.planning.recipe_options import ExportOptions, RecipeOptions, build_recipe, place_of
from quantforge.recipe import LIMITS, Recipe, Rule

PAGES = ("cli", "bench", "serve", "speculation")
TEXT = "\n".join((Path(__file__).parents[2] / f"docs/{page}.md").read_text() for page in PAGES)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# What only a recipe file says: no option, because few ever change it.
IN_FILES_ALONE = {
    "calibration.micro_batch", "calibration.precision", "calibration.sha256", "calibration.random_share",
    "gptq.damping", "gptq.shrinkage", "gptq.passes", "awq.search_samples", "adapter.sha256",
}  # fmt: skip


def places(kind: Any = Recipe, before: str = "") -> Iterator[str]:
    """Dotted names of all fields of a recipe, those of its tables included."""
    for field in fields(kind):
        hint = get_type_hints(kind)[field.name]
        if is_dataclass(hint):
            yield from places(hint, f"{before}{field.name}.")
        else:
            yield before + field.name


def flags(command: Any) -> list[set[str]]:
    """The ways to type each option of a command."""
    return [{*one.opts, *one.secondary_opts} for one in command.params if one.opts[0][0] == "-"]


def test_every_field_of_a_recipe_has_one_option_or_none_by_decision() -> None:
    names = list(RecipeOptions.__annotations__)
    assert choices.RECIPE_OPTIONS.keys() == {*names, "recipe"}
    stand_for = [place_of(name)[0] for name in names]
    assert len(set(stand_for)) == len(names)
    assert {*stand_for, *IN_FILES_ALONE} == {*places()}
    assert not IN_FILES_ALONE & {*stand_for}
    assert LIMITS.keys() <= {*places()}


def test_numbers_of_a_recipe_have_limits() -> None:
    """Other numbers are checked by their table, which `LIMITS` cannot say: between 0 and 1, both excluded."""
    numbers = {place for place in places() if kinds(_hint(place)) & {int, float}}
    assert numbers - LIMITS.keys() == {"gptq.damping"}


def _hint(place: str) -> Any:
    kind: Any = Recipe
    for field in place.split("."):
        kind = get_type_hints(kind)[field]
    return kind


def test_methods_get_every_field_of_a_rounding_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    larger = make_dataclass("Rounding", [("effort", str), ("scales", str, "search")])
    monkeypatch.setattr(recipe, "Rounding", larger)
    rounding: Any = Recipe(effort="high", scales="absmax").rounding
    assert (rounding.effort, rounding.scales) == ("high", "absmax")


def test_an_option_that_a_table_lacks_is_named_with_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RecipeOptions.__annotations__, "hqq_steps", "int | None")
    with pytest.raises(RuntimeError, match=r"'hqq_steps'.*PLACES in recipe_options\.py"):
        place_of("hqq_steps")
    without_groups = dict.fromkeys(choices.HELP_GROUPS, ())
    monkeypatch.setattr(choices, "HELP_GROUPS", without_groups)
    with pytest.raises(RuntimeError, match=r"'bits'.*HELP_GROUPS in choices\.py"):
        list(choices.recipe_parameters(["bits"]))


def test_a_choice_has_the_type_of_its_field() -> None:
    for name, hint in get_type_hints(RecipeOptions).items():
        field = place_of(name)[1]
        wanted = {Sequence[str]} if get_origin(field) is tuple else kinds(field)
        if name == "rules":
            wanted = {Sequence[str | Rule]}
        assert kinds(hint) == wanted, name


def kinds(hint: Any) -> set[Any]:
    """The types of a field but None."""
    found = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return {kind for kind in found if kind is not type(None)}


def test_an_export_takes_the_same_choices_from_a_program() -> None:
    asked = {
        name
        for name in choices.RECIPE_OPTIONS
        if choices.flag_of(name) in set().union(*flags(COMMANDS["export"]))
    }
    assert asked == ExportOptions.__annotations__.keys()
    with pytest.raises(UsageError, match="no option 'method'"):
        export("absent", method="gptq", format="awq")  # type: ignore[call-arg]


def test_zero_is_a_choice_and_nothing_is_none() -> None:
    assert build_recipe(None, refine=0).gptq.refine == 0
    assert build_recipe(None, refine=None, ignore=[], chat_template=False) == Recipe()
    assert build_recipe(None, seed=7, chat_template=True).calibration.seed == 7
    with pytest.raises(UsageError, match="no option 'smaples'"):
        build_recipe(None, smaples=3)


def test_every_option_is_in_the_documentation() -> None:
    for verb, shown in COMMANDS.items():
        for ways in flags(shown):
            if "--help" not in ways:
                told = any(re.search(rf"(?<![\w-]){way}(?![\w-])", TEXT) for way in ways)
                assert told, (verb, ways)


def test_every_option_in_the_documentation_exists() -> None:
    known = {way for command in COMMANDS.values() for ways in flags(command) for way in ways}
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    spans = [
        span
        for span in re.findall(r"`([^`]+)`", prose)
        if not span.startswith(("model_signing", "torchrun"))
    ]
    told = {way for span in spans for way in re.findall(r"(?<![\w-])--?[a-z][\w-]*", span)}
    assert len(told) > 50
    known |= {way for ways in flags(typer.main.get_command(app)) for way in ways}
    assert told - known == {"--debug", "--help"}  # for every verb, taken out before them


def test_the_table_of_what_is_asked_for_has_every_option_of_a_recipe() -> None:
    table = TEXT.partition("## What is asked for")[2].partition("\n## ")[0]
    first = " ".join(line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `"))
    for name in choices.RECIPE_OPTIONS:
        flag = choices.flag_of(name)
        assert re.search(rf"{flag}(?![\w-])", first), flag
