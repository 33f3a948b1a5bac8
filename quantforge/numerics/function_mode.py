"""A mode of torch that is one method: what is done instead of every function that is called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]


class FunctionMode(TorchFunctionMode, ABC):
    """Context in which `call` stands for every function of torch and every method of a tensor."""

    @abstractmethod
    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what ``function(*args, **kwargs)`` is to return; the mode is off meanwhile."""

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Forward a call to `call`; torch's interface."""
        return self.call(func, args, kwargs or {})
