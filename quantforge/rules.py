"""Rules: which layers a pattern means, and which pattern decides.

A pattern is a name (``lm_head``), the end of one at a dot (``mlp.down_proj``), a glob (``*.layers.0.*``) or a regular
expression that matches the whole name (``re:...``). Ignores come first, then rules in their order; the first that
matches decides. A pattern that matches nothing is an error: a typo must not silently quantize what was to be kept.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.errors import InputError, nearest
from quantforge.recipe import Recipe
from quantforge.scheme import Scheme, parse

_NESTED = re.compile(r"\([^()]*[+*][^()]*\)[+*{]")


@dataclass(frozen=True, slots=True)
class Choice:
    """What a rule says about a layer: a scheme, or None to keep it; and the rule as text."""

    scheme: Scheme | None
    rule: str


class Rules:
    """The ignores and rules of a recipe, checked against the layers of a model."""

    def __init__(self, recipe: Recipe, tensors: Sequence[MatchedTensor]) -> None:
        self._rules = [(pattern, "keep", f"ignore {pattern}") for pattern in recipe.ignore]
        self._rules += [
            (rule.match, rule.scheme, f"rule {rule.match}={rule.scheme}") for rule in recipe.rules
        ]
        self._schemes = {
            text: None if text == "keep" else parse(text) for _, text, _ in self._rules
        }
        layers = [
            t for t in tensors if t.role in {Role.LINEAR, Role.HEAD, Role.EMBEDDING, Role.FOREIGN}
        ]
        for pattern, _, _ in self._rules:
            if not any(matches(pattern, tensor) for tensor in layers):
                names = {tensor.name.removesuffix(".weight") for tensor in layers}
                leaves = {name.rpartition(".")[2] for name in names}
                raise InputError(
                    f"pattern '{pattern}' matches no layer",
                    nearest(pattern.removeprefix("re:"), names | leaves),
                )

    def choose(self, tensor: MatchedTensor) -> Choice | None:
        """The first rule that matches a layer, or None."""
        for pattern, scheme, text in self._rules:
            if matches(pattern, tensor):
                return Choice(self._schemes[scheme], text)
        return None


def matches(pattern: str, tensor: MatchedTensor) -> bool:
    """Whether a pattern means a layer, by its canonical or its stored name.

    Raises:
        InputError: the pattern is no regular expression, or one that can take exponential time.
    """
    names = {name.removesuffix(".weight") for name in (tensor.name, tensor.stored.name)}
    if pattern.startswith("re:"):
        expression = _compile(pattern)
        return any(expression.fullmatch(name) for name in names)
    pattern = pattern.removesuffix(".weight")
    return any(
        name == pattern or name.endswith(f".{pattern}") or fnmatch.fnmatchcase(name, pattern)
        for name in names
    )


def _compile(pattern: str) -> re.Pattern[str]:
    text = pattern.removeprefix("re:")
    if _NESTED.search(text):
        raise InputError(
            f"pattern '{pattern}': a repetition inside a repetition", "write it without nesting"
        )
    try:
        return re.compile(text)
    except re.error as error:
        raise InputError(
            f"pattern '{pattern}': {error}", "patterns without re: are globs"
        ) from error
