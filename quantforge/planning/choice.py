"""The one order of decision: what becomes of a tensor, whatever a format calls its schemes.

An ignore or a rule decides first, then ``--head`` and ``--embedding``, then the default of the format; what was decided
is replaced by something near it, as an event, where a shape cannot hold it; what has no place at all stays as it is.
A format only says in its own terms what a scheme is, what its default is, and what takes the place of what does not fit
(`Terms`). Most engines load the linears that read one activation as one matrix: where they do, a rule for one of them
decides for all.

A pattern of a rule is a name (``lm_head``), the end of one at a dot (``mlp.down_proj``), a glob (``*.layers.0.*``) or a
regular expression that matches the whole name (``re:...``). Ignores come first, then rules in their order; the first
that matches decides. A rule that means layers inside of the blocks does not reach the output projection and the
embedding, which most engines cannot load quantized: those have to be meant by a rule of their own. A pattern that
matches nothing is an error: a typo must not silently quantize what was to be kept. So is one that gives a scheme to
nothing but what is never rounded, routers and experts that are stored as one tensor; where it means others too,
`Rules.notes` say so.
"""

from __future__ import annotations

import fnmatch
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, TypeVar

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.errors import InputError, nearest
from quantforge.events import Event
from quantforge.formats import KEEP, patterns
from quantforge.formats.gguf.families import name_from_gguf
from quantforge.notation import parse_layer
from quantforge.recipe import Recipe
from quantforge.scheme import LayerScheme

QUANTIZABLE = ("F32", "F16", "BF16")  # types of source tensors
AnyScheme = TypeVar(
    "AnyScheme"
)  # by which a format stores a tensor: a `LayerScheme`, or the name of a type of ggml
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
        here = name_from_gguf(pattern, sorted(names))
        raise InputError(
            f"pattern '{pattern}' matches no layer",
            f"that is a name of llama.cpp's files: here it is {here}"
            if here
            else nearest(pattern.removeprefix("re:"), names | leaves),
        )
    return _INNER if choice.scheme and roles & _INNER else frozenset(roles)


def _out_of_reach(pattern: str, tensors: Sequence[MatchedTensor]) -> list[str]:
    """Return names of matrices, or stacks of them, inside of blocks that a pattern means but no rule reaches."""
    return [
        tensor.header.name
        for tensor in tensors
        if tensor.role is Role.OTHER and tensor.block >= 0 and len(tensor.header.shape) > 1
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
    if len(pattern) > patterns.MAX_PATTERN_LENGTH:
        raise InputError(f"pattern '{pattern[:100]}...': {len(pattern)} characters")
    names = {name.removesuffix(".weight") for name in (tensor.name, tensor.header.name)}
    if pattern.startswith("re:"):
        text = pattern.removeprefix("re:")
        try:
            return any(patterns.matches_pattern(text, name, full_match=True) for name in names)
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


@dataclass(frozen=True, slots=True)
class Decision(Generic[AnyScheme]):
    """Scheme of a tensor, and the rule that gave it."""

    scheme: AnyScheme
    rule: str


@dataclass(frozen=True, slots=True)
class Fitted(Generic[AnyScheme]):
    """Scheme that a tensor's shape can hold; where it is another than was decided: what changed, and why."""

    scheme: AnyScheme
    change: str = ""
    reason: str = ""


class Terms(ABC, Generic[AnyScheme]):
    """Schemes of one format for the tensors of one model."""

    @abstractmethod
    def stated(self, tensor: MatchedTensor, choice: Choice) -> AnyScheme:
        """Return the scheme that a choice asks for; raise `RefusedError` where the format has none."""

    @abstractmethod
    def default(self, tensor: MatchedTensor) -> Decision[AnyScheme]:
        """Return what becomes of a tensor of which nothing is said."""

    @abstractmethod
    def fitted(self, tensor: MatchedTensor, scheme: AnyScheme) -> Fitted[AnyScheme]:
        """Return the scheme, or its substitute; raise `RefusedError` where there is none."""

    @abstractmethod
    def left(self, tensor: MatchedTensor, scheme: AnyScheme) -> Fitted[AnyScheme] | None:
        """Return what a tensor stays as that has no place in the files for its shape alone, None where it has one."""


class Choices(Generic[AnyScheme]):
    """Decisions on the tensors of one model, and what is to be told about them.

    Args:
        wanted: what the recipe says.
        tensors: all that may be written.
        terms: the schemes of the format.
        together: whether a rule for one of the linears that read an activation decides for all of them.

    Raises:
        InputError: as `Rules`, or the head or the embedding that something is wanted for is not there.
    """

    def __init__(
        self,
        wanted: Recipe,
        tensors: Sequence[MatchedTensor],
        terms: Terms[AnyScheme],
        *,
        together: bool,
    ) -> None:
        self._terms = terms
        self._rules = Rules(wanted, tensors)
        self.notes = self._rules.notes
        self.substitutions: list[Event] = []
        head = "" if wanted.head == KEEP else wanted.head
        self._outside = {Role.HEAD: head, Role.EMBEDDING: wanted.embedding}
        roles = {tensor.role for tensor in tensors}
        for role, text in self._outside.items():
            if text not in {"", KEEP} and role not in roles:
                raise InputError(
                    f"--{role.value} {text}: the model has no {role.value} that could be told by its name",
                    f"drop --{role.value}",
                )
        self._weights = sum(
            math.prod(tensor.header.shape) for tensor in tensors if tensor.role is Role.LINEAR
        )
        self._siblings: dict[str, list[MatchedTensor]] = {}
        for tensor in tensors if together else ():
            if tensor.shared and tensor.role is Role.LINEAR:
                self._siblings.setdefault(tensor.shared, []).append(tensor)

    def decided(self, tensor: MatchedTensor) -> Decision[AnyScheme]:
        """Decide on a tensor; a substitution is noted."""
        choice = self._asked(tensor)
        chosen = self._wanted(tensor, choice)
        # what is asked for by name is rounded or refused
        left = self._left(tensor, chosen) if choice is None else None
        fitted = left or self._terms.fitted(tensor, chosen.scheme)
        if not fitted.reason:
            return Decision(fitted.scheme, chosen.rule)
        detail = f"{fitted.change}: {fitted.reason}"
        self.substitutions.append(Event("substitution", tensor.header.name, detail))
        return Decision(fitted.scheme, f"{chosen.rule}; substituted: {fitted.reason}")

    def _left(self, tensor: MatchedTensor, chosen: Decision[AnyScheme]) -> Fitted[AnyScheme] | None:
        """Return what a tensor stays as where its shape, or that of one joined with it, has no place in the files.

        None where it is rounded.
        """
        for other in self._siblings.get(tensor.shared, (tensor,)):
            found = self._terms.left(other, chosen.scheme)
            if found is not None:
                beside = "" if other is tensor else f"{other.header.name}: "
                share = math.prod(tensor.header.shape) / self._weights
                return replace(found, reason=f"{beside}{found.reason} ({share:.2%} of its linears)")
        return None

    def chosen(self, tensor: MatchedTensor) -> Decision[AnyScheme]:
        """Return what is wanted for a tensor, whether its shape can hold it or not."""
        return self._wanted(tensor, self._asked(tensor))

    def _asked(self, tensor: MatchedTensor) -> Choice | None:
        """Return what a rule says of a tensor, else ``--head`` or ``--embedding``."""
        wanted = self._outside.get(tensor.role, "")
        if (ruled := self._ruled(tensor)) is not None or not wanted:
            return ruled
        scheme = None if wanted == KEEP else parse_layer(wanted)
        return Choice(scheme, f"--{tensor.role.value} {wanted}")

    def _wanted(self, tensor: MatchedTensor, choice: Choice | None) -> Decision[AnyScheme]:
        if choice is None:
            return self._terms.default(tensor)
        return Decision(self._terms.stated(tensor, choice), choice.rule)

    def _ruled(self, tensor: MatchedTensor) -> Choice | None:
        """Return what a rule says of a tensor, or of another one that engines join with it."""
        found = {
            other.header.name: choice
            for other in self._siblings.get(tensor.shared, (tensor,))
            if (choice := self._rules.choose(other)) is not None
        }
        if len({choice.scheme for choice in found.values()}) > 1:
            raise InputError(
                f"rules give different schemes to layers that engines load as one matrix: {', '.join(sorted(found))}",
                "give q, k and v (gate and up) the same scheme",
            )
        if not found or tensor.header.name in found:
            return found.get(tensor.header.name)
        name, choice = next(iter(found.items()))
        return Choice(choice.scheme, f"{choice.rule}, tied to {name.removesuffix('.weight')}")
