"""Calls of decoder blocks: their arguments and outputs, and stand-ins that record calls instead of computing blocks."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

HIDDEN_STATES = "hidden_states"


class Call(NamedTuple):
    """The arguments of one forward of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StandIn(nn.Module):
    """Stand-in for a block: records its arguments and returns the hidden states unchanged, or calls ``override``.

    Attributes:
        states, call: the hidden states and the other arguments of the last recorded forward pass.
        override: computes the return value instead; None to record and pass through.
        num_outputs: see `LayerKind.num_outputs`.
    """

    def __init__(self, block: nn.Module, num_outputs: int = 0) -> None:
        super().__init__()
        self.states = torch.empty(0)
        self.call = Call((), {})
        self.override: Callable[[Tensor, Call], Any] | None = None
        self.num_outputs = num_outputs
        self._block = (block,)  # in a tuple, so that it is no part of the model

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute in the real block: models read, for instance, its attention type."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._block[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return values in the structure that the block returns, without computing the block."""
        states, call = split_call(args, kwargs)
        if self.override is not None:
            return self.override(states, call)
        self.states, self.call = states, call
        return self.wrap_output(states)

    def wrap_output(self, states: Tensor, extra_outputs: tuple[Any, ...] = ()) -> Any:
        """Return hidden states in the structure that the block returns: alone, or first in a tuple."""
        if not self.num_outputs:
            return states
        return (states, *(extra_outputs or (None,) * (self.num_outputs - 1)))

    def clear(self) -> None:
        """Drop the recorded arguments."""
        self.states, self.call = torch.empty(0), Call((), {})


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """Split the arguments of a block into its hidden states (first argument, or keyword) and the others."""
    if args:
        return args[0], Call(args[1:], kwargs)
    other_kwargs = dict(kwargs)
    return other_kwargs.pop(HIDDEN_STATES), Call((), other_kwargs)


def hidden_states_of(returned: Any) -> Tensor:
    """Return the hidden states among the outputs of a block."""
    states: Tensor = returned[0] if isinstance(returned, tuple | list) else returned
    return states


def extra_outputs_of(returned: Any) -> tuple[Any, ...]:
    """Return the outputs of a block other than its hidden states."""
    return tuple(returned[1:]) if isinstance(returned, tuple | list) else ()


def mutable_mappings(call: Call) -> dict[str, MutableMapping[Any, Any]]:
    """Return the mutable mappings among the keyword arguments of a call, which a block can write to."""
    return {key: value for key, value in call.kwargs.items() if isinstance(value, MutableMapping)}
