"""Built-in sets of a release: lists of variants that people publish together, by what the built-in recipes say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quantforge.errors import InputError, nearest
from quantforge.planning.recipe_options import builtin_recipes, load_recipe

LADDER = "gguf-ladder"
ALL = "everything"
_TYPES = (
    "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K_M", "IQ4_XS", "Q4_K_M", "Q5_K_M",
    "Q6_K", "Q8_0",
)  # fmt: skip


def set_names() -> list[str]:
    """Return the names of all sets: the ladder, each engine that has recipes, everything."""
    recipes = (load_recipe(name) for name in builtin_recipes())
    return [LADDER, *sorted({one.engine for one in recipes if one.engine}), ALL]


def variants_of(name: str) -> dict[str, Mapping[str, str]]:
    """Return the choices of each variant of a set, by its name.

    Raises:
        InputError: there is no such set.
    """
    if name not in (known := set_names()):
        raise InputError(f"no set '{name}'", nearest(name, known))
    if name == LADDER:
        return {kind: {"type": kind} for kind in _TYPES}
    recipes = {one: load_recipe(one) for one in builtin_recipes()}
    if name != ALL:
        return {one: {"recipe": one} for one, recipe in recipes.items() if recipe.engine == name}
    found, seen = variants_of(LADDER), set()
    for one, recipe in sorted(recipes.items(), key=lambda item: not item[0].startswith("vllm")):
        alike = replace(recipe, engine=None).to_toml()
        if recipe.type is None and alike not in seen:  # engines that take the same file share it
            seen.add(alike)
            found[one] = {"recipe": one}
    return found
