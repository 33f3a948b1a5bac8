"""The built-in recipes: TOML files whose first lines say what they are, how good, and what they need.

A file begins with ``# what it is``, ``# quality: ...`` and ``# needs: ...``; engine and width follow from its keys. A
quality is a KL divergence from the source in nats per token, measured on a small model (``docs/results``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from quantforge.formats.gguf.mixture import BY_BITS
from quantforge.notation import parse_layer
from quantforge.planning.recipe_options import builtin_recipes
from quantforge.recipe import Recipe, from_toml

_HEAD = re.compile(r"# (?P<about>.+)\n# quality: (?P<quality>.+)\n# needs: (?P<needs>.+)\n")
_SEVERAL = "several"


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
        found, key=lambda name: (found[name].engine != _SEVERAL, found[name].engine, found[name].bits, name)
    )  # fmt: skip
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
    if wanted.type is not None:
        return next(bits for bits, mixture in BY_BITS.items() if mixture == wanted.type)
    return wanted.bits or parse_layer(wanted.scheme or "").weight.bits
