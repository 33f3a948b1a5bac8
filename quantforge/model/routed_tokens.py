"""Input of the experts of one block, kept once for all calibration rows: hidden states, and where they are sent.

Tokens are numbered over all rows: ``row * length + position``. Outputs are added up here as well, expert by expert, so
that no more than one expert has to be in memory at a time; a token's own sum is made in the order of the experts, as
transformers does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantforge.model.hidden_states import TokenStates


class RoutedTokens:
    """The input of a mixture of experts with its routing, and room for the output.

    Args:
        shape: how many calibration rows there are, and how long they are.
        store: makes room for states ``[rows, length, width]``.
        numbers: of the rows in the calibration text, where they are others than these.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        store: Callable[[int], TokenStates],
        numbers: Sequence[int] = (),
    ) -> None:
        (self._rows, self._length), self._make = shape, store
        self._numbers = numbers or range(self._rows)
        self._lock = threading.Lock()
        self._stores: list[TokenStates] = []
        self._index = torch.empty(0, dtype=torch.int32)
        self._weights = torch.empty(0)
        self._outputs: TokenStates | None = None

    @property
    def count(self) -> int:
        """Return the number of all tokens."""
        return self._rows * self._length

    @property
    def chosen(self) -> int:
        """Return how many experts a token is sent to."""
        return self._index.shape[1]

    def row_of(self, token: int) -> int:
        """Return the calibration row of a token."""
        return self._numbers[token // self._length]

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
        self.put(self._stores[0], row, states)
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

    def places(self, expert: int, tokens: Tensor) -> Tensor:
        """Return where the weights of tokens ``[tokens, k]`` are those of an expert, as ones and zeros."""
        return (self._index[tokens] == expert).float()

    def begin_outputs(self) -> None:
        """Make room for outputs, which are zeros."""
        if self._outputs is None:
            self._outputs = self.zeros()
        else:
            self._clear(self._outputs)

    def zeros(self) -> TokenStates:
        """Return room for ``[tokens, width]`` of all tokens, as wide as the input, filled with zeros; until `close`."""
        width = self.states(torch.zeros(1, dtype=torch.int64)).shape[1]
        store = self._make(width)
        self._stores.append(store)
        self._clear(store)
        return store

    def _clear(self, store: TokenStates) -> None:
        width = self.states(torch.zeros(1, dtype=torch.int64)).shape[1]
        for row in range(self._rows):
            store.write(row, torch.zeros(1, self._length, width))

    def add(self, tokens: Tensor, values: Tensor) -> None:
        """Add ``[tokens, width]`` to the outputs of some tokens, given their ascending numbers."""
        assert self._outputs is not None
        self._outputs.scatter(tokens, self._outputs.gather(tokens) + values.cpu())

    def outputs(self, row: int, tokens: int) -> Tensor:
        """Return the outputs ``[tokens, width]`` from the first token of a row on."""
        assert self._outputs is not None
        return self.run(self._outputs, row, tokens)

    def run(self, store: TokenStates, row: int, tokens: int) -> Tensor:
        """Return ``[tokens, width]`` of a store from the first token of a row on."""
        return store.read(row, row + tokens // self._length).flatten(0, 1)

    def put(self, store: TokenStates, row: int, values: Tensor) -> None:
        """Write ``[tokens, width]`` to a store from the first token of a row on."""
        store.write(row, values.view(-1, self._length, values.shape[-1]))

    def close(self) -> None:
        """Release memory or disk."""
        for store in self._stores:
            store.close()
