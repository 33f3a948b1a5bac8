"""How a block calls its experts: with the routing of its tokens, or with these spread over all experts.

The module of the experts takes, in most families of transformers, hidden states, the experts of each token and their
weights, and returns the weighed sums. In a few it takes one tensor ``[experts * tokens, width]``: every token stands
there once for each expert, multiplied by the weight that the router gave it, which is 0 for experts that it is not sent
to; what they return has the same rows. Experts then read, and are summarised by, inputs that are weighed already.
Where each token has one expert, that is the first form: the states are its only row that is not 0, of weight 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantforge.numerics.values import finite


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """Tokens that reach experts in one call of their module.

    Attributes:
        states: ``[tokens, width]``.
        index: ``[tokens, k]``, the experts of each token.
        weights: ``[tokens, k]``, what the output of each is multiplied with.
        spread: over so many experts the tokens were spread; 0 where they were not.
    """

    states: Tensor
    index: Tensor
    weights: Tensor
    spread: int = 0

    def returned(self, outputs: Tensor) -> Tensor:
        """Return what the module returns, given the weighed sum ``[tokens, width]`` of what the experts do."""
        if not self.spread:
            return outputs
        rows = outputs.new_zeros(self.spread, *outputs.shape)
        places = (self.index[:, 0], torch.arange(len(outputs), device=outputs.device))
        return rows.index_put_(places, outputs).flatten(0, 1)


def takes_spread(module: nn.Module) -> bool:
    """Return whether the module of experts takes one tensor, in which tokens are spread over them."""
    itself_and_states = 2
    return len(inspect.signature(type(module).forward).parameters) == itself_and_states


def routed_call(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], experts: int
) -> RoutedCall | None:
    """Return what reaches the experts in a call of their module; None where it is called in neither form.

    Tokens that are spread over several experts each are not understood: their inputs would differ by expert.
    """
    found = bound(module, args, kwargs)
    if not all(isinstance(one, Tensor) and one.dim() == 2 for one in found):
        return None
    if takes_spread(module):
        return _gathered(found[0], experts)
    if len(found) != 3:
        return None
    states, index, weights = found
    same = index.shape == weights.shape == (len(states), index.shape[1])
    return RoutedCall(states, index, weights) if same and not index.is_floating_point() else None


def bound(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call in the order of the module's signature."""
    taken = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    return list(taken.arguments.values())[1:]


def arguments_of_one(module: nn.Module, states: Tensor) -> tuple[Tensor, ...]:
    """Return what the module takes while it holds one expert, to which tokens ``[tokens, width]`` are sent."""
    if takes_spread(module):
        return (states,)
    index = torch.zeros(len(states), 1, dtype=torch.int64, device=states.device)
    return states, index, states.new_ones(len(states), 1)


def _gathered(spread: Tensor, experts: int) -> RoutedCall | None:
    if not len(spread) or len(spread) % experts:
        return None
    rows = spread.reshape(experts, -1, spread.shape[1])
    sent = (rows != 0).any(-1)
    if int(sent.sum(0).max()) > 1 and finite(spread):  # of what is not finite, every row is not 0
        return None
    index = sent.byte().argmax(0)
    states = rows[index, torch.arange(len(index), device=index.device)]
    return RoutedCall(states, index[:, None], states.new_ones(len(index), 1), experts)
