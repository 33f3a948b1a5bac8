"""The experts of one block stood in for while rows pass: what reaches them is kept, what they return is put in.

The module of the experts is called in one of two forms (`quantforge.model.expert_calls`); a call of another kind is
refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantforge.architectures import LayerKind
from quantforge.errors import InputError, RefusedError
from quantforge.model.expert_calls import RoutedCall, bound, routed_call, takes_spread
from quantforge.model.expert_weights import ExpertWeights, Load
from quantforge.model.routed_tokens import RoutedTokens
from quantforge.numerics.finite import finite

# Takes the first calibration row, hidden states [tokens, width] and weights of the router [tokens, k].
Outputs = Callable[[int, Tensor, Tensor], Tensor]


class RoutedExperts(ExpertWeights):
    """Experts of a block with the tokens that are sent to them.

    Attributes:
        tokens: that were collected, None before.
    """

    def __init__(self, name: str, block: nn.Module, kind: LayerKind, load: Load) -> None:
        """Prepare; arguments as of `ExpertWeights`."""
        super().__init__(name, block, kind, load)
        self._row = threading.local()
        self.tokens: RoutedTokens | None = None

    def at(self, row: int) -> None:
        """Note which calibration row this thread runs from now on."""
        self._row.first = row

    @contextmanager
    def collecting(self, tokens: RoutedTokens) -> Iterator[None]:
        """Keep what reaches the experts while the block runs.

        What they return is not known yet, so that NaN stands for it.
        """
        self.forget_tokens()
        self.tokens = tokens

        def keep(*args: Any, **kwargs: Any) -> Tensor:
            call = self._call(args, kwargs)
            self._check(call.states, tokens)
            tokens.keep(self._row.first, call.states, call.index, call.weights)
            return call.returned(torch.full_like(call.states, torch.nan))

        with self._standing_in(keep):
            yield

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Let NaN stand for what the experts return."""
        with self.computing(lambda _, states, __: torch.full_like(states, torch.nan)):
            yield

    @contextmanager
    def returning(self) -> Iterator[None]:
        """Let the experts return the outputs that were added up, while the block runs."""

        def outputs(row: int, states: Tensor, _: Tensor) -> Tensor:
            assert self.tokens is not None
            return self.tokens.outputs(row, len(states)).to(states)

        with self.computing(outputs):
            yield

    @contextmanager
    def computing(self, outputs: Outputs) -> Iterator[None]:
        """Let a function compute what the experts return, while the block runs."""

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            call = self._call(args, kwargs)
            return call.returned(outputs(self._row.first, call.states, call.weights))

        with self._standing_in(forward):
            yield

    def close(self) -> None:
        """Release the tokens and all weights."""
        self._held.clear()
        self.forget_tokens()

    def forget_tokens(self) -> None:
        """Release the tokens."""
        if self.tokens is not None:
            self.tokens.close()
        self.tokens = None

    @contextmanager
    def _standing_in(self, forward: Callable[..., Tensor]) -> Iterator[None]:
        self._module.forward = forward
        try:
            yield
        finally:
            del self._module.forward

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RoutedCall:
        """Return what reaches the experts in a call of their module.

        Raises:
            RefusedError: it is called otherwise.
        """
        call = routed_call(self._module, args, kwargs, len(self.numbers))
        if call is not None:
            return call
        found = bound(self._module, args, kwargs)
        shapes = [list(one.shape) if isinstance(one, Tensor) else one for one in found]
        expected = "hidden states, the experts of each token and their weights"
        if takes_spread(self._module):
            expected = f"tokens that are spread over {len(self.numbers)} experts, each sent to one of them,"
        raise RefusedError(
            f"{self.name}: called with {shapes}, where {expected} are expected; its experts cannot be calibrated",
            "--method rtn --calibration none",
            tensor=self.name,
        )

    def _check(self, states: Tensor, tokens: RoutedTokens) -> None:
        if not finite(states):
            row = tokens.row_of(tokens.in_rows(self._row.first))
            raise InputError(
                f"{self.name}: what reaches the experts is not finite in calibration row {row}",
                "the model overflows on this text, or a norm weight is damaged; `quantforge inspect` checks weights",
                tensor=self.name,
            )
