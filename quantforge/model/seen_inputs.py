"""Inputs of linears, seen while a block runs on several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")


class EnoughError(Exception):
    """Signal that everything that is wanted of a forward was seen."""


class SeenInputs:
    """Inputs that linears have read, ``[tokens, in_features]`` by key, for each thread that runs the block.

    ``enough``: a run ends when this linear has been reached.
    """

    def __init__(self, enough: str | None) -> None:
        self._enough = enough
        self._of_thread = threading.local()

    def during(self, run: Callable[[], Result]) -> tuple[Result, dict[str, Tensor]]:
        """Run the block on this thread; return its result and what was read."""
        found: dict[str, Tensor] = {}
        self._of_thread.found = found
        try:
            return run(), found
        finally:
            del self._of_thread.found

    @contextmanager
    def listening(self, module: nn.Module, key: str) -> Iterator[None]:
        """Note what a linear reads."""

        def see(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].detach().flatten(0, -2)
            self._of_thread.found[key] = x.float() if x.dtype == torch.bfloat16 else x
            if key == self._enough:
                raise EnoughError

        handle = module.get_submodule(key).register_forward_pre_hook(see)
        try:
            yield
        finally:
            handle.remove()
