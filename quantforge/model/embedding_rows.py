"""Embeddings of which only the rows of tokens that occur are held.

The model looks its tokens up by their own numbers, as ever; before it does, they are renumbered to the rows that are
held. Rows of a token that comes up later, a padding token that the model puts in, are read then.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from quantforge.model.loading import empty, parameter

LARGE = 1 << 24  # numbers of an embedding that is held whole


class EmbeddingRows:
    """An embedding of a model, held for the tokens that occur; safe on several threads.

    Args:
        module: the embedding, which is empty.
        read: returns the rows of ascending tokens.
        tokens: that occur, ascending, or few of them.
        stack: takes the hook that renumbers.
    """

    def __init__(
        self, module: nn.Module, read: Callable[[Tensor], Tensor], tokens: Tensor, stack: ExitStack
    ) -> None:
        self._module, self._read, self._tokens = module, read, tokens
        self._lock = threading.Lock()
        setattr(module, "padding_idx", None)  # noqa: B010  # of any class that embeds
        module.weight = parameter(read(tokens))
        handle = module.register_forward_pre_hook(self._renumber, with_kwargs=True)
        stack.callback(handle.remove)
        stack.callback(empty, module)

    def _renumber(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = dict(kwargs)
        ids = args[0] if args else values.pop(next(iter(values)))
        with self._lock:
            occurring = torch.unique(ids).to(self._tokens)
            if not torch.isin(occurring, self._tokens).all():
                self._tokens = torch.unique(torch.cat([self._tokens, occurring]))
                self._module.weight = parameter(self._read(self._tokens).to(ids.device))
        rows = torch.searchsorted(self._tokens, ids.to(self._tokens)).to(ids.device)
        return (rows, *args[1:]), values


def is_lookup(module: nn.Module) -> bool:
    """Return whether a module is an embedding that is called with tokens alone."""
    if not isinstance(module, nn.Embedding):
        return False
    taken = list(inspect.signature(type(module).forward).parameters)
    return taken[1:] in (["input"], ["input_ids"])
