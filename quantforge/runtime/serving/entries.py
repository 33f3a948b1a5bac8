"""A request on its way through an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from quantforge.runtime.ragged import Span
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.serving.generation_requests import GenerationRequest
from quantforge.runtime.speculation.tree import DraftTree


@dataclass(eq=False, slots=True)
class ServedEntry:
    """A request that waits, or is computed in a row of the cache.

    Attributes:
        request: it.
        order: its number; what came first is served first.
        sampler: chooses its tokens; goes on where it was when the request has to be computed again.
        tokens: of the prompt, and those chosen since.
        row: of the cache, while it is computed.
        scored: tokens of the prompt whose log-probabilities were told.
    """

    request: GenerationRequest
    order: int
    sampler: RowSampler
    tokens: list[int] = field(default_factory=list)
    row: int | None = None
    scored: int = 1  # the first follows nothing

    @property
    def new(self) -> tuple[int, ...]:
        """Return its new tokens."""
        return tuple(self.tokens[len(self.request.ids) :])


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of an entry that a step computes.

    Attributes:
        entry: it.
        row: of the cache.
        first: place of the first token, which is the number of those in the cache.
        tokens: their number.
        tree: drafted tokens after them.
    """

    entry: ServedEntry
    row: int
    first: int
    tokens: int
    tree: DraftTree = field(default_factory=DraftTree)

    @property
    def ids(self) -> list[int]:
        """Return the tokens, and the drafted ones after them."""
        return [*self.entry.tokens[self.first : self.first + self.tokens], *self.tree.tokens]

    @property
    def span(self) -> Span:
        """Return what the model computes."""
        mask = None if self.tree.is_chain else self.tree.mask(root=True)
        return Span(self.row, self.tokens + len(self.tree.tokens), mask)

    @property
    def chooses(self) -> bool:
        """Return whether the next token follows: nothing of the entry is left to compute."""
        return self.first + self.tokens == len(self.entry.tokens)

    @property
    def scores(self) -> bool:
        """Return whether log-probabilities of the prompt are asked for that this tells for the first time."""
        entry, last = self.entry, min(self.first + self.tokens, len(self.entry.request.ids) - 1)
        return entry.request.prompt_logprobs is not None and last >= entry.scored
