"""A torch function mode with a single method that is called in place of every torch function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]


class FunctionMode(TorchFunctionMode, ABC):
    """Context in which `call` replaces every torch function and tensor method."""

    @abstractmethod
    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of ``function(*args, **kwargs)`` or a replacement; the mode is disabled during the call."""

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Forward a call to `call`; the interface of torch."""
        return self.call(func, args, kwargs or {})
