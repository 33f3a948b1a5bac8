"""Input of the experts of one block, kept once for all calibration rows: hidden states, and where they are sent.

Tokens are numbered over all rows: ``row * length + position``. Outputs are added up here as well, expert by expert, so
that no more than one expert has to be in memory at a time; a token's own sum is made in the order of the experts, as
transformers does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from quantforge.model.hidden_states import TokenStates


class RoutedTokens:
    """The input of a mixture of experts with its routing, and room for the output.

    Args:
        shape: how many calibration rows there are, and how long they are.
        store: makes room for states ``[rows, length, width]``.
    """

    def __init__(self, shape: tuple[int, int], store: Callable[[int], TokenStates]) -> None:
        (self._rows, self._length), self._make = shape, store
        self._lock = threading.Lock()
        self._stores: list[TokenStates] = []
        self._index = torch.empty(0, dtype=torch.int32)
        self._weights = torch.empty(0)
        self._outputs: TokenStates | None = None

    @property
    def count(self) -> int:
        """Return the number of all tokens."""
        return self._rows * self._length

    def in_rows(self, rows: int) -> int:
        """Return how many tokens so many rows have."""
        return rows * self._length

    def keep(self, row: int, states: Tensor, index: Tensor, weights: Tensor) -> None:
        """Keep what reaches the experts of the rows from ``row`` on; safe on several threads.

        Args:
            row: the first.
            states: ``[tokens, width]``.
            index: ``[tokens, k]``, the experts of each token.
            weights: ``[tokens, k]``, what the output of each is multiplied with.
        """
        with self._lock:
            if not self._stores:
                self._stores.append(self._make(states.shape[-1]))
                self._index = torch.empty(self.count, index.shape[-1], dtype=torch.int32)
                self._weights = torch.empty(self.count, index.shape[-1])
        self._stores[0].write(row, states.view(-1, self._length, states.shape[-1]))
        run = slice(row * self._length, row * self._length + len(states))
        self._index[run], self._weights[run] = index.int(), weights.float()

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return the ascending numbers of the tokens that are sent to an expert, and their weights ``[tokens]``."""
        sent = self._index == expert
        tokens = sent.any(1).nonzero().flatten()
        return tokens, (self._weights * sent)[tokens].sum(1)

    def counts(self, experts: int) -> list[int]:
        """Return how many tokens each expert has."""
        known = self._index[self._index < experts]
        counts: list[int] = known.long().bincount(minlength=experts).tolist()
        return counts

    def states(self, tokens: Tensor) -> Tensor:
        """Return the input ``[tokens, width]`` of some tokens, given their ascending numbers."""
        return self._stores[0].gather(tokens)

    def begin_outputs(self) -> None:
        """Make room for outputs, which are zeros."""
        states = self._stores[0]
        width = states.gather(torch.zeros(1, dtype=torch.int64)).shape[1]
        if self._outputs is None:
            self._outputs = self._make(width)
            self._stores.append(self._outputs)
        for row in range(self._rows):
            self._outputs.write(row, torch.zeros(1, self._length, width))

    def add(self, tokens: Tensor, values: Tensor) -> None:
        """Add ``[tokens, width]`` to the outputs of some tokens, given their ascending numbers."""
        assert self._outputs is not None
        self._outputs.scatter(tokens, self._outputs.gather(tokens) + values.cpu())

    def outputs(self, row: int, tokens: int) -> Tensor:
        """Return the outputs ``[tokens, width]`` from the first token of a row on."""
        assert self._outputs is not None
        return self._outputs.read(row, row + tokens // self._length).flatten(0, 1)

    def close(self) -> None:
        """Release memory or disk."""
        for store in self._stores:
            store.close()
