"""Stand-ins for the blocks of a model: they note what each block gets, and hand on what it would return.

The rest of the model runs as it is. A block may return its hidden states alone or first in a tuple; what the model does
with the result (it may take element 0 of it) decides that a stand-in has to return the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

STATES = "hidden_states"


class Call(NamedTuple):
    """The arguments of one forward of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StandIn(nn.Module):
    """Stand-in for a block: notes its arguments and returns the hidden states, or those that its thread injects.

    Attributes:
        states, call: of the last forward: the hidden states, and what came beside them.
        inject: its ``states``, for each thread.
        answer: returns what the stand-in is to return instead; None where it notes and injects.
        returned: as that of `LayerKind`.
        beside: what is returned beside the hidden states; None in its place where it is empty.
    """

    def __init__(self, block: nn.Module, returned: int = 0) -> None:
        super().__init__()
        self.states = torch.empty(0)
        self.call = Call((), {})
        self.inject = threading.local()
        self.answer: Callable[[Tensor, Call], Any] | None = None
        self.returned = returned
        self.beside: tuple[Any, ...] = ()
        self._block = (block,)  # in a tuple, so that it is no part of the model

    def __getattr__(self, name: str) -> Any:
        """Answer for the block, which models ask for the kind of its attention and the like."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._block[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Note the arguments; return what the block would, with hidden states that are not its."""
        if self.answer is not None:
            return self.answer(*parted(args, kwargs))
        self.states, self.call = parted(args, kwargs)
        return self.wrapped(getattr(self.inject, "states", self.states))

    def wrapped(self, states: Tensor, beside: tuple[Any, ...] = ()) -> Any:
        """Return hidden states as the block returns its own."""
        if not self.returned:
            return states
        return (states, *(beside or self.beside or (None,) * (self.returned - 1)))

    def forget(self) -> None:
        """Let go of what was noted."""
        self.states, self.call = torch.empty(0), Call((), {})


def parted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """Return the hidden states of a call, which are its first argument or have their name, and the rest of it."""
    if args:
        return args[0], Call(args[1:], kwargs)
    rest = dict(kwargs)
    return rest.pop(STATES), Call((), rest)


def states_of(returned: Any) -> Tensor:
    """Return the hidden states that a block returned."""
    found: Tensor = returned[0] if isinstance(returned, tuple | list) else returned
    return found


def beside_of(returned: Any) -> tuple[Any, ...]:
    """Return what a block returned beside its hidden states."""
    return tuple(returned[1:]) if isinstance(returned, tuple | list) else ()


def mappings(call: Call) -> dict[str, MutableMapping[Any, Any]]:
    """Return the arguments of a call that a block can put something into, by name."""
    return {key: value for key, value in call.kwargs.items() if isinstance(value, MutableMapping)}
