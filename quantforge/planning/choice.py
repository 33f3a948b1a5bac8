"""The one order of decision: what becomes of a tensor, whatever form a format stores it in.

An ignore or a rule decides first, then ``--head`` and ``--embedding``, then the default of the format; what was decided
is replaced by something near it, as an event, where a shape cannot hold it; what has no place at all stays as it is.
A format only says in its own terms what a
scheme is, what its default is, and what takes the place of what does not fit (`Terms`). Most engines load the linears
that read one activation as one matrix: where they do, a rule for one of them decides for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.errors import InputError
from quantforge.events import Event
from quantforge.formats import KEEP
from quantforge.notation import parse_layer
from quantforge.planning.rules import Choice, Rules
from quantforge.recipe import Recipe

QUANTIZABLE = ("F32", "F16", "BF16")  # types of source tensors
Form = TypeVar("Form")  # in which a format stores a tensor: a scheme, or a type of ggml


@dataclass(frozen=True, slots=True)
class Decision(Generic[Form]):
    """Form of a tensor, and the rule that gave it."""

    form: Form
    rule: str


@dataclass(frozen=True, slots=True)
class Fitted(Generic[Form]):
    """Form that a tensor's shape can hold; where it is another than was decided: what changed, and why."""

    form: Form
    change: str = ""
    reason: str = ""


class Terms(Protocol[Form]):
    """Forms of one format for the tensors of one model."""

    def stated(self, tensor: MatchedTensor, choice: Choice) -> Form:
        """Return the form that a choice asks for; raise `RefusedError` where the format has none."""

    def default(self, tensor: MatchedTensor) -> Decision[Form]:
        """Return what becomes of a tensor of which nothing is said."""

    def fitted(self, tensor: MatchedTensor, form: Form) -> Fitted[Form]:
        """Return the form, or its substitute; raise `RefusedError` where there is none."""

    def left(self, tensor: MatchedTensor, form: Form) -> Fitted[Form] | None:
        """Return what a tensor stays as that has no place in the files for its shape alone, None where it has one."""


class Choices(Generic[Form]):
    """Decisions on the tensors of one model, and what is to be told about them.

    Args:
        wanted: what the recipe says.
        tensors: all that may be written.
        terms: the forms.
        together: whether a rule for one of the linears that read an activation decides for all of them.

    Raises:
        InputError: as `Rules`, or the head or the embedding that something is wanted for is not there.
    """

    def __init__(
        self,
        wanted: Recipe,
        tensors: Sequence[MatchedTensor],
        terms: Terms[Form],
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
            math.prod(tensor.stored.shape) for tensor in tensors if tensor.role is Role.LINEAR
        )
        self._siblings: dict[str, list[MatchedTensor]] = {}
        for tensor in tensors if together else ():
            if tensor.shared and tensor.role is Role.LINEAR:
                self._siblings.setdefault(tensor.shared, []).append(tensor)

    def decided(self, tensor: MatchedTensor) -> Decision[Form]:
        """Decide on a tensor; a substitution is noted."""
        choice = self._asked(tensor)
        chosen = self._wanted(tensor, choice)
        # what is asked for by name is rounded or refused
        left = self._left(tensor, chosen) if choice is None else None
        fitted = left or self._terms.fitted(tensor, chosen.form)
        if not fitted.reason:
            return Decision(fitted.form, chosen.rule)
        detail = f"{fitted.change}: {fitted.reason}"
        self.substitutions.append(Event("substitution", tensor.stored.name, detail))
        return Decision(fitted.form, f"{chosen.rule}; substituted: {fitted.reason}")

    def _left(self, tensor: MatchedTensor, chosen: Decision[Form]) -> Fitted[Form] | None:
        """Return what a tensor stays as where its shape, or that of one joined with it, has no place in the files.

        None where it is rounded.
        """
        for other in self._siblings.get(tensor.shared, (tensor,)):
            found = self._terms.left(other, chosen.form)
            if found is not None:
                beside = "" if other is tensor else f"{other.stored.name}: "
                share = math.prod(tensor.stored.shape) / self._weights
                return replace(found, reason=f"{beside}{found.reason} ({share:.2%} of its linears)")
        return None

    def chosen(self, tensor: MatchedTensor) -> Decision[Form]:
        """Return what is wanted for a tensor, whether its shape can hold it or not."""
        return self._wanted(tensor, self._asked(tensor))

    def _asked(self, tensor: MatchedTensor) -> Choice | None:
        """Return what a rule says of a tensor, else ``--head`` or ``--embedding``."""
        wanted = self._outside.get(tensor.role, "")
        if (ruled := self._ruled(tensor)) is not None or not wanted:
            return ruled
        scheme = None if wanted == KEEP else parse_layer(wanted)
        return Choice(scheme, f"--{tensor.role.value} {wanted}")

    def _wanted(self, tensor: MatchedTensor, choice: Choice | None) -> Decision[Form]:
        if choice is None:
            return self._terms.default(tensor)
        return Decision(self._terms.stated(tensor, choice), choice.rule)

    def _ruled(self, tensor: MatchedTensor) -> Choice | None:
        """Return what a rule says of a tensor, or of another one that engines join with it."""
        found = {
            other.stored.name: choice
            for other in self._siblings.get(tensor.shared, (tensor,))
            if (choice := self._rules.choose(other)) is not None
        }
        if len({choice.scheme for choice in found.values()}) > 1:
            raise InputError(
                f"rules give different schemes to layers that engines load as one matrix: {', '.join(sorted(found))}",
                "give q, k and v (gate and up) the same scheme",
            )
        if not found or tensor.stored.name in found:
            return found.get(tensor.stored.name)
        name, choice = next(iter(found.items()))
        return Choice(choice.scheme, f"{choice.rule}, tied to {name.removesuffix('.weight')}")
