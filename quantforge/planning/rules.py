"""Rules: which layers a pattern means, and which pattern decides.

A pattern is a name (``lm_head``), the end of one at a dot (``mlp.down_proj``), a glob (``*.layers.0.*``) or a regular
expression that matches the whole name (``re:...``). Ignores come first, then rules in their order; the first that
matches decides. A rule that means layers inside of the blocks does not reach the output projection and the embedding,
which most engines cannot load quantized: those have to be meant by a rule of their own. A pattern that matches nothing
is an error: a typo must not silently quantize what was to be kept. So is one that gives a scheme to nothing but what is
never rounded, routers and experts that are stored as one tensor; where it means others too, `Rules.notes` say so.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.errors import InputError, nearest
from quantforge.formats import KEEP, patterns
from quantforge.formats.gguf.families import name_here
from quantforge.notation import parse_layer
from quantforge.recipe import Recipe
from quantforge.scheme import LayerScheme

_INNER = frozenset({Role.LINEAR})
_OUTER = frozenset({Role.HEAD, Role.EMBEDDING})
_KEPT = frozenset({Role.FOREIGN, Role.OTHER})  # an ignore may name what is kept anyway


_NEVER = "routers and experts that are stored as one tensor stay as they are"


@dataclass(frozen=True, slots=True)
class Choice:
    """Decision of a rule on a layer: a scheme, or None to keep it; and the rule as text."""

    scheme: LayerScheme | None
    rule: str


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: str
    choice: Choice
    roles: frozenset[Role]  # what it reaches


class Rules:
    """The ignores and rules of a recipe, checked against the layers of a model.

    Raises:
        InputError: a pattern matches no layer (the nearest name is given) or is malformed, or a scheme is none.
    """

    def __init__(self, wanted: Recipe, tensors: Sequence[MatchedTensor]) -> None:
        stated = [(pattern, Choice(None, f"ignore {pattern}")) for pattern in wanted.ignore]
        for rule in wanted.rules:
            scheme = None if rule.scheme == KEEP else parse_layer(rule.scheme)
            stated.append((rule.match, Choice(scheme, f"rule {rule.match}={rule.scheme}")))
        self._rules = [
            _Rule(pattern, choice, _reach(pattern, choice, tensors)) for pattern, choice in stated
        ]
        self.notes = tuple(
            f"{choice.rule} also means {_listed(missed)}: {_NEVER}"
            for pattern, choice in stated
            if choice.scheme is not None and (missed := _out_of_reach(pattern, tensors))
        )

    def choose(self, tensor: MatchedTensor) -> Choice | None:
        """Return the first rule that matches a layer, or None."""
        for rule in self._rules:
            if tensor.role in rule.roles and matches(rule.pattern, tensor):
                return rule.choice
        return None


def _reach(pattern: str, choice: Choice, tensors: Sequence[MatchedTensor]) -> frozenset[Role]:
    allowed = _INNER | _OUTER | (_KEPT if choice.scheme is None else frozenset())
    layers = [tensor for tensor in tensors if tensor.role in allowed]
    roles = {tensor.role for tensor in layers if matches(pattern, tensor)}
    if not roles and (missed := _out_of_reach(pattern, tensors)):
        raise InputError(
            f"pattern '{pattern}' matches no layer that can be rounded, but {_listed(missed)}",
            f"{_NEVER}: drop the rule",
            tensor=missed[0],
        )
    if not roles:
        names = {tensor.name.removesuffix(".weight") for tensor in layers}
        leaves = {name.rpartition(".")[2] for name in names}
        here = name_here(pattern, sorted(names))
        raise InputError(
            f"pattern '{pattern}' matches no layer",
            f"that is a name of llama.cpp's files: here it is {here}" if here
            else nearest(pattern.removeprefix("re:"), names | leaves),
        )  # fmt: skip
    return _INNER if choice.scheme and roles & _INNER else frozenset(roles)


def _out_of_reach(pattern: str, tensors: Sequence[MatchedTensor]) -> list[str]:
    """Return names of matrices, or stacks of them, inside of blocks that a pattern means but no rule reaches."""
    return [
        tensor.stored.name
        for tensor in tensors
        if tensor.role is Role.OTHER and tensor.block >= 0 and len(tensor.stored.shape) > 1
        if matches(pattern, tensor)
    ]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"


def matches(pattern: str, tensor: MatchedTensor) -> bool:
    """Return whether a pattern means a layer, by its canonical or its stored name.

    Raises:
        InputError: the pattern is no regular expression, or takes too long.
    """
    if len(pattern) > patterns.LONGEST:
        raise InputError(f"pattern '{pattern[:100]}...': {len(pattern)} characters")
    names = {name.removesuffix(".weight") for name in (tensor.name, tensor.stored.name)}
    if pattern.startswith("re:"):
        text = pattern.removeprefix("re:")
        try:
            return any(patterns.matches(text, name, whole=True) for name in names)
        except InputError as error:
            hint = error.hint or "patterns without re: are globs"
            raise InputError(f"re:{error.message}", hint) from error
    pattern = pattern.removesuffix(".weight")
    return any(
        name == pattern or name.endswith(f".{pattern}") or _glob(pattern).match(name)
        for name in names
    )


@lru_cache(maxsize=1 << 14)
def _glob(pattern: str) -> re.Pattern[str]:
    """Return a compiled glob; `fnmatch` keeps 256, and recipes name hundreds of layers for every tensor."""
    return re.compile(fnmatch.translate(pattern))
