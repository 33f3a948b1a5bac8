"""The order in which rules, options and defaults decide the scheme of each tensor, for every format.

An ignore pattern or a rule decides first, then ``--lm-head`` and ``--embedding``, then the default of the format. If
the shape of a tensor cannot hold the chosen scheme, a similar one is substituted and recorded as an event; if there is
none, the tensor stays unquantized. A format only defines what a scheme means in its files, what its default is, and
what replaces a scheme that does not fit (`FormatSchemes`). Most engines load linears that read the same activation (q,
k, v) as one matrix: there a rule for one of them decides for all.

The pattern of a rule is a full name (``lm_head``), the end of a name after a dot (``mlp.down_proj``), a glob
(``*.layers.0.*``) or a regular expression that matches the whole name (``re:...``). Ignore patterns come first, then
rules in their order; the first match decides. A rule that matches linears inside the blocks does not apply to the
output projection and the embedding, which most engines cannot load quantized: these need a rule of their own. A pattern
that matches nothing is an error, because a typo must not silently quantize a tensor that the user wanted to keep. It is
also an error if a rule with a scheme only matches tensors that are never quantized (routers, experts stored as one
tensor); if it matches others too, `RecipeRules.notes` tells.
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
from quantforge.errors import InputError, nearest_hint
from quantforge.events import Event
from quantforge.formats import KEEP, patterns
from quantforge.formats.gguf.families import name_from_gguf
from quantforge.notation import parse_layer
from quantforge.recipe import Recipe
from quantforge.scheme import LayerScheme

QUANTIZABLE = ("F32", "F16", "BF16")  # dtypes of source tensors
AnyScheme = TypeVar("AnyScheme")  # how a format names a scheme: a `LayerScheme`, or a ggml type
_BLOCK_ROLES = frozenset({Role.LINEAR})
_OUTER_ROLES = frozenset({Role.HEAD, Role.EMBEDDING})
_OPTIONS = {Role.HEAD: "--lm-head", Role.EMBEDDING: "--embedding"}
_UNQUANTIZED_ROLES = frozenset({Role.FOREIGN, Role.OTHER})  # an ignore pattern may match them
_NEVER_QUANTIZED = "routers and experts that are stored as one tensor stay as they are"


@dataclass(frozen=True, slots=True)
class RequestedScheme:
    """The scheme that a rule or an option gives to a tensor (None to keep it), and the rule as text."""

    scheme: LayerScheme | None
    rule: str


@dataclass(frozen=True, slots=True)
class _CheckedRule:
    pattern: str
    request: RequestedScheme
    roles: frozenset[Role]  # roles of the tensors that it applies to


class RecipeRules:
    """The ignore patterns and rules of a recipe, checked against the tensors of a model.

    Attributes:
        notes: notes on rules that also match tensors that are never quantized.

    Raises:
        InputError: a pattern is malformed or matches no layer (the nearest name is suggested), or a scheme is invalid.
    """

    def __init__(self, recipe: Recipe, tensors: Sequence[MatchedTensor]) -> None:
        requested = [
            (pattern, RequestedScheme(None, f"ignore {pattern}")) for pattern in recipe.ignore
        ]
        for rule in recipe.rules:
            scheme = None if rule.scheme == KEEP else parse_layer(rule.scheme)
            requested.append(
                (rule.match, RequestedScheme(scheme, f"rule {rule.match}={rule.scheme}"))
            )
        self._rules = [
            _CheckedRule(pattern, request, _matched_roles(pattern, request, tensors))
            for pattern, request in requested
        ]
        self.notes = tuple(
            f"{request.rule} also means {_first_and_count(names)}: {_NEVER_QUANTIZED}"
            for pattern, request in requested
            if request.scheme is not None and (names := _never_quantized_names(pattern, tensors))
        )

    def first_match(self, tensor: MatchedTensor) -> RequestedScheme | None:
        """Return the request of the first rule that matches a tensor, or None if no rule does."""
        for rule in self._rules:
            if tensor.role in rule.roles and matches(rule.pattern, tensor):
                return rule.request
        return None


def _matched_roles(
    pattern: str, request: RequestedScheme, tensors: Sequence[MatchedTensor]
) -> frozenset[Role]:
    matchable = (
        _BLOCK_ROLES
        | _OUTER_ROLES
        | (_UNQUANTIZED_ROLES if request.scheme is None else frozenset())
    )
    layers = [tensor for tensor in tensors if tensor.role in matchable]
    roles = {tensor.role for tensor in layers if matches(pattern, tensor)}
    if not roles and (never_quantized := _never_quantized_names(pattern, tensors)):
        raise InputError(
            f"pattern '{pattern}' matches no layer that can be rounded, but {_first_and_count(never_quantized)}",
            f"{_NEVER_QUANTIZED}: drop the rule",
            tensor=never_quantized[0],
        )
    if not roles:
        names = {tensor.name.removesuffix(".weight") for tensor in layers}
        last_parts = {name.rpartition(".")[2] for name in names}
        name_in_model = name_from_gguf(pattern, sorted(names))
        raise InputError(
            f"pattern '{pattern}' matches no layer",
            f"that is a name of llama.cpp's files: here it is {name_in_model}"
            if name_in_model
            else nearest_hint(pattern.removeprefix("re:"), names | last_parts),
        )
    return _BLOCK_ROLES if request.scheme and roles & _BLOCK_ROLES else frozenset(roles)


def _never_quantized_names(pattern: str, tensors: Sequence[MatchedTensor]) -> list[str]:
    """Return names of matrices in the blocks that a pattern matches but that are never quantized."""
    return [
        tensor.header.name
        for tensor in tensors
        if tensor.role is Role.OTHER and tensor.block >= 0 and len(tensor.header.shape) > 1
        if matches(pattern, tensor)
    ]


def _first_and_count(names: Sequence[str]) -> str:
    more_suffix = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more_suffix}"


def matches(pattern: str, tensor: MatchedTensor) -> bool:
    """Return whether a pattern matches a tensor, by its canonical name or its name in the files.

    Raises:
        InputError: the pattern is not a valid regular expression, or takes too long.
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
    """Compile a glob pattern; unlike `fnmatch`, which caches 256, cache the hundreds of names that recipes hold."""
    return re.compile(fnmatch.translate(pattern))


@dataclass(frozen=True, slots=True)
class ChosenScheme(Generic[AnyScheme]):
    """The scheme of a tensor in the terms of its format, and the rule that chose it."""

    scheme: AnyScheme
    rule: str


@dataclass(frozen=True, slots=True)
class FittedScheme(Generic[AnyScheme]):
    """The scheme that the shape of a tensor can hold.

    Attributes:
        scheme: the scheme itself, or its substitute.
        change: what was substituted, as text; "" if nothing was.
        reason: why it was substituted; "" if it was not.
    """

    scheme: AnyScheme
    change: str = ""
    reason: str = ""


class FormatSchemes(ABC, Generic[AnyScheme]):
    """Schemes of one format for the tensors of one model; subclasses define them for a kind of format."""

    @abstractmethod
    def from_request(self, tensor: MatchedTensor, choice: RequestedScheme) -> AnyScheme:
        """Convert a requested scheme to the format; raise `RefusedError` if the format has no such scheme."""

    @abstractmethod
    def default(self, tensor: MatchedTensor) -> ChosenScheme[AnyScheme]:
        """Return the default scheme of a tensor that no rule or option names."""

    @abstractmethod
    def fit_to_shape(self, tensor: MatchedTensor, scheme: AnyScheme) -> FittedScheme[AnyScheme]:
        """Return the scheme or a substitute that the tensor's shape can hold; raise `RefusedError` if there is none."""

    @abstractmethod
    def unquantized_fallback(
        self, tensor: MatchedTensor, scheme: AnyScheme
    ) -> FittedScheme[AnyScheme] | None:
        """Return how a tensor is kept if its shape alone prevents the scheme; None if it can be quantized."""


class SchemeChooser(Generic[AnyScheme]):
    """Chooses the scheme of every tensor of one model from rules, options and the defaults of the format.

    Args:
        recipe: the recipe with rules, ``head`` and ``embedding``.
        tensors: all tensors that may be written.
        format_schemes: the schemes of the format.
        join_linears: whether a rule for one of the linears that read the same activation decides for all of them.

    Attributes:
        notes: notes of the rules.
        substitutions: events for the schemes that were substituted so far.

    Raises:
        InputError: as `RecipeRules`, or a scheme is requested for a head or an embedding that the model does not have.
    """

    def __init__(
        self,
        recipe: Recipe,
        tensors: Sequence[MatchedTensor],
        format_schemes: FormatSchemes[AnyScheme],
        *,
        join_linears: bool,
    ) -> None:
        self._schemes = format_schemes
        self._rules = RecipeRules(recipe, tensors)
        self.notes = self._rules.notes
        self.substitutions: list[Event] = []
        head = "" if recipe.lm_head == KEEP else recipe.lm_head
        self._outer_schemes = {Role.HEAD: head, Role.EMBEDDING: recipe.embedding}
        roles = {tensor.role for tensor in tensors}
        for role, text in self._outer_schemes.items():
            if text not in {"", KEEP} and role not in roles:
                raise InputError(
                    f"{_OPTIONS[role]} {text}: the model has no {role.value} that could be told by its name",
                    f"drop {_OPTIONS[role]}",
                )
        self._linear_weights = sum(
            math.prod(tensor.header.shape) for tensor in tensors if tensor.role is Role.LINEAR
        )
        self._joined_linears: dict[str, list[MatchedTensor]] = {}
        for tensor in tensors if join_linears else ():
            if tensor.shared_input and tensor.role is Role.LINEAR:
                self._joined_linears.setdefault(tensor.shared_input, []).append(tensor)

    def choose(self, tensor: MatchedTensor) -> ChosenScheme[AnyScheme]:
        """Choose the scheme of a tensor, recording an event if it is substituted."""
        request = self._request(tensor)
        choice = self._scheme_for(tensor, request)
        # a tensor that was requested by name is quantized or refused
        fallback = self._shape_fallback(tensor, choice) if request is None else None
        fitted = fallback or self._schemes.fit_to_shape(tensor, choice.scheme)
        if not fitted.reason:
            return ChosenScheme(fitted.scheme, choice.rule)
        detail = f"{fitted.change}: {fitted.reason}"
        self.substitutions.append(Event("substitution", tensor.header.name, detail))
        return ChosenScheme(fitted.scheme, f"{choice.rule}; substituted: {fitted.reason}")

    def _shape_fallback(
        self, tensor: MatchedTensor, choice: ChosenScheme[AnyScheme]
    ) -> FittedScheme[AnyScheme] | None:
        """Return how a tensor is kept if its shape, or that of a linear joined with it, cannot hold the scheme.

        None if all of them can be quantized.
        """
        for other in self._joined_linears.get(tensor.shared_input, (tensor,)):
            fallback = self._schemes.unquantized_fallback(other, choice.scheme)
            if fallback is not None:
                tensor_prefix = "" if other is tensor else f"{other.header.name}: "
                weight_share = math.prod(tensor.header.shape) / self._linear_weights
                return replace(
                    fallback,
                    reason=f"{tensor_prefix}{fallback.reason} ({weight_share:.2%} of its linears)",
                )
        return None

    def choose_ignoring_shape(self, tensor: MatchedTensor) -> ChosenScheme[AnyScheme]:
        """Return the scheme that rules and defaults choose for a tensor, whether its shape can hold it or not."""
        return self._scheme_for(tensor, self._request(tensor))

    def _request(self, tensor: MatchedTensor) -> RequestedScheme | None:
        """Return what a rule requests for a tensor, else what ``--lm-head`` or ``--embedding`` does."""
        requested = self._outer_schemes.get(tensor.role, "")
        if (ruled := self._rule_request(tensor)) is not None or not requested:
            return ruled
        scheme = None if requested == KEEP else parse_layer(requested)
        return RequestedScheme(scheme, f"{_OPTIONS[tensor.role]} {requested}")

    def _scheme_for(
        self, tensor: MatchedTensor, choice: RequestedScheme | None
    ) -> ChosenScheme[AnyScheme]:
        if choice is None:
            return self._schemes.default(tensor)
        return ChosenScheme(self._schemes.from_request(tensor, choice), choice.rule)

    def _rule_request(self, tensor: MatchedTensor) -> RequestedScheme | None:
        """Return what a rule requests for a tensor, or for a linear that engines join with it."""
        choices = {
            other.header.name: choice
            for other in self._joined_linears.get(tensor.shared_input, (tensor,))
            if (choice := self._rules.first_match(other)) is not None
        }
        if len({choice.scheme for choice in choices.values()}) > 1:
            raise InputError(
                f"rules give different schemes to layers that engines load as one matrix: {', '.join(sorted(choices))}",
                "give q, k and v (gate and up) the same scheme",
            )
        if not choices or tensor.header.name in choices:
            return choices.get(tensor.header.name)
        name, choice = next(iter(choices.items()))
        return RequestedScheme(
            choice.scheme, f"{choice.rule}, tied to {name.removesuffix('.weight')}"
        )
