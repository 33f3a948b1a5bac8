"""A size that is asked for in place of a width, and the recipe beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantforge.errors import UsageError
from quantforge.formats import targets
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.quantizers import ERROR_FEEDBACK
from quantforge.recipe import LayerChoices, Recipe


@dataclass(frozen=True, slots=True)
class AskedSize:
    """A size that is asked for: a target as it is typed, or a file that is to be matched; one of the two.

    Attributes:
        target, like: these.
        candidates: schemes to choose from; those that the format holds in usual widths where there are none.
        recipe: what is wanted beside the size, without a width.
    """

    target: str | None
    like: str | Path | None
    candidates: str | Sequence[str]
    recipe: Recipe

    def __post_init__(self) -> None:
        if (self.target is None) == (self.like is None):
            said = "no size is asked for" if self.target is None else "two sizes are asked for"
            raise UsageError(
                f"{said}: --target and --like", "give one: --target 3.5bpw, or --like FILE.gguf"
            )


def asked_size(
    target: str | None, like: str | Path | None, candidates: str | Sequence[str], recipe: RecipeSource,
    options: RecipeOptions,
) -> AskedSize | None:  # fmt: skip
    """Return the size that is asked for beside a recipe, None where none is.

    Raises:
        UsageError: candidates without a size, two sizes, or a width beside one.
    """
    if target is None and like is None:
        if candidates:
            raise UsageError("--candidates: chosen among for which size", "add --target 3.5bpw")
        return None
    return AskedSize(target, like, candidates, width_left_open(recipe, options))


def width_left_open(recipe: RecipeSource, options: RecipeOptions) -> Recipe:
    """Return the recipe without a width: what an engine is fast with in one width is not meant here."""
    engine = options.pop("engine", None)
    devices = None if engine is None else options.pop("tensor_parallel", None)
    wanted = build_recipe(recipe, **options)
    if engine is not None:
        wanted = replace(wanted, engine=engine, tensor_parallel=devices or wanted.tensor_parallel)
        targets.target_of(engine)
    _check(wanted.method, wanted.layers, wanted.guide, wanted.effort)
    return replace(wanted, method=ERROR_FEEDBACK)


def _check(method: str, layers: LayerChoices, guide: int | None, effort: str) -> None:
    if method not in {"", ERROR_FEEDBACK}:
        raise UsageError(
            f"--method {method}: errors are measured of {ERROR_FEEDBACK} alone",
            "leave --method out",
        )
    if layers.bits or layers.scheme or layers.type or layers.rules:
        raise UsageError(
            "a width, a type or rules are given, and the size decides on them",
            "name --candidates instead, or leave the size out",
        )
    if guide:
        raise UsageError(f"--guide {guide}: errors are measured without it", "leave it out")
    if effort != Recipe().effort:
        raise UsageError(
            f"--effort {effort}: errors are measured at {Recipe().effort}",
            "remove `effort` from the recipe, or the option; `quantforge allocate` writes a recipe, then"
            f" `quantforge quantize --recipe FILE --effort {effort}`",
        )
