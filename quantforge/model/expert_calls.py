"""Interpret the two ways in which a block calls its module of experts.

In most families of transformers, the module takes hidden states, the expert indices of each token and their weights,
and returns the weighted sums. In a few families it takes one tensor ``[experts * tokens, width]``: every token is
repeated
once per expert, multiplied by its router weight, which is 0 for experts that it is not routed to; the outputs have the
same rows. Those experts therefore read inputs that are already weighted. If each token has one expert, the second form
reduces to the first: the only nonzero repeat of a token is its state, with weight 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantforge.numerics.values import all_finite


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """Tokens that reach the experts in one call of their module.

    Attributes:
        states: ``[tokens, width]``.
        experts: ``[tokens, k]``, the expert indices of each token.
        weights: ``[tokens, k]``, the factors of the experts' outputs.
        num_repeats: how often every token was repeated, once per expert; 0 if tokens were not repeated.
    """

    states: Tensor
    experts: Tensor
    weights: Tensor
    num_repeats: int = 0

    def module_output(self, outputs: Tensor) -> Tensor:
        """Return the weighted sums ``[tokens, width]`` of the experts in the form that the module returns."""
        if not self.num_repeats:
            return outputs
        rows = outputs.new_zeros(self.num_repeats, *outputs.shape)
        positions = (self.experts[:, 0], torch.arange(len(outputs), device=outputs.device))
        return rows.index_put_(positions, outputs).flatten(0, 1)


def takes_repeated_tokens(module: nn.Module) -> bool:
    """Return whether a module of experts takes one tensor with every token repeated once per expert."""
    itself_and_states = 2
    return len(inspect.signature(type(module).forward).parameters) == itself_and_states


def parse_expert_call(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], experts: int
) -> RoutedCall | None:
    """Return the tokens and their routing in a call of a module of experts; None if the call has neither form.

    Repeated tokens that are routed to several experts each are not supported: their inputs would differ by expert.
    """
    values = bound_arguments(module, args, kwargs)
    if not all(isinstance(value, Tensor) and value.dim() == 2 for value in values):
        return None
    if takes_repeated_tokens(module):
        return _gather_repeated_tokens(values[0], experts)
    if len(values) != 3:
        return None
    states, indices, weights = values
    matching_shapes = indices.shape == weights.shape == (len(states), indices.shape[1])
    return (
        RoutedCall(states, indices, weights)
        if matching_shapes and not indices.is_floating_point()
        else None
    )


def bound_arguments(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call in the order of the module's signature."""
    arguments = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    return list(arguments.arguments.values())[1:]


def single_expert_arguments(module: nn.Module, states: Tensor) -> tuple[Tensor, ...]:
    """Return the arguments of a module that holds one expert, for tokens ``[tokens, width]`` routed to it."""
    if takes_repeated_tokens(module):
        return (states,)
    index = torch.zeros(len(states), 1, dtype=torch.int64, device=states.device)
    return states, index, states.new_ones(len(states), 1)


def _gather_repeated_tokens(repeated: Tensor, experts: int) -> RoutedCall | None:
    if not len(repeated) or len(repeated) % experts:
        return None
    rows = repeated.reshape(experts, -1, repeated.shape[1])
    is_routed = (rows != 0).any(-1)
    if int(is_routed.sum(0).max()) > 1 and all_finite(
        repeated
    ):  # of what is not finite, every row is not 0
        return None
    index = is_routed.byte().argmax(0)
    states = rows[index, torch.arange(len(index), device=index.device)]
    return RoutedCall(states, index[:, None], states.new_ones(len(index), 1), experts)
