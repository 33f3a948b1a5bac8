"""Conversion of stored tensors into parameters, by the objects of transformers that do it whenever it loads.

A `Source` is one such rule applied to one checkpoint: which stored tensors it takes and what it makes of them. What a
rule computes is learnt by running it, on tensors with or without memory; where it only puts matrices into a stack, a
`Place` says where each of them lies, so that a stack is filled matrix by matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quantforge.architectures import Place, Stack
from quantforge.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_JOINS = ((), ("Concatenate",))  # what may follow the stacking of experts: gate and up become one
_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Source:
    """Stored tensors of which parameters of the running model are made.

    Attributes:
        parameters: their names, with the shapes that the rule gives them.
        stored: names of the stored tensors, in the order in which the rule takes them.
        patterns: of each stored tensor the pattern of the rule that took it; empty where only the name differs.
        rule: transformers' converter, None where only the name differs.
    """

    parameters: Mapping[str, tuple[int, ...]]
    stored: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    rule: Any = None

    @property
    def operations(self) -> tuple[str, ...]:
        """Return what the rule does, by the names of transformers' operations."""
        return tuple(type(item).__name__ for item in self.rule.operations) if self.rule else ()

    def places(self) -> dict[str, Place]:
        """Return the place of each stored matrix in a stack of experts, by stored name.

        The stack bears the full name of its parameter. Empty for a rule that does more than to stack.
        """
        steps: Sequence[Any] = self.rule.operations if self.rule else ()
        joins = steps[1:]
        stacks = self.operations[:1] == ("MergeModulelist",) and steps[0].dim == 0
        if not stacks or self.operations[1:] not in _JOINS or len(self.parameters) > 1:
            return {}
        if any(step.dim != 1 or step.num_shards_attribute for step in joins):
            return {}
        order = [text for text in self.rule.source_patterns if text in self.patterns]
        if len(order) != 1 + len(joins) * (len(order) - 1):
            return {}
        (parameter,) = self.parameters
        stack = Stack(parameter, tuple(text.replace("*", "{}") for text in order))
        counts: Counter[str] = Counter()
        found = {}
        for name, pattern in zip(self.stored, self.patterns, strict=True):
            found[name] = Place(stack, order.index(pattern), counts[pattern])
            counts[pattern] += 1
        return found


def converted(
    model: PreTrainedModel,
    rule: Any,
    names: Sequence[str],
    patterns: Sequence[str],
    read: Callable[[str], Tensor],
    first: str,
) -> dict[str, Tensor]:
    """Run a converter on stored tensors; return the parameters that it makes, by name.

    Args:
        model: whose parameters they are.
        rule: transformers' converter.
        names: of the stored tensors.
        patterns: of the rule, one for each of them.
        read: returns a stored tensor by name.
        first: the parameter in which the first of them ends.

    Raises:
        InputError: the converter fails on them.
    """
    own = deepcopy(rule)
    for name, pattern in zip(names, patterns, strict=True):
        own.add_tensor(first, name, pattern, read(name))
    try:
        made = own.convert(first, model=model, config=model.config)
    except _FAILURES as error:
        steps = " and ".join(type(item).__name__ for item in rule.operations)
        raise InputError(
            f"{first}: transformers cannot make it of {len(names)} tensor(s) ({names[0]}) by {steps}: {error}",
            "the checkpoint is not complete, or not of this model",
            tensor=names[0],
        ) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
