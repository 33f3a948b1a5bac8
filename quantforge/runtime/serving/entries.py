"""A request on its way through an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from quantforge.runtime.sampling import Sampler
from quantforge.runtime.serving.generation_requests import GenerationRequest


@dataclass(eq=False, slots=True)
class ServedEntry:
    """A request that waits, or is computed in a row of the cache.

    Attributes:
        request: it.
        order: its number; what came first is served first.
        sampler: chooses its tokens; goes on where it was when the request has to be computed again.
        tokens: of the prompt, and those chosen since.
        row: of the cache, while it is computed.
        done: it is finished, and computed on only because its static batch is.
    """

    request: GenerationRequest
    order: int
    sampler: Sampler
    tokens: list[int] = field(default_factory=list)
    row: int | None = None
    done: bool = False

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
    """

    entry: ServedEntry
    row: int
    first: int
    tokens: int

    @property
    def chooses(self) -> bool:
        """Return whether the next token follows: nothing of the entry is left to compute."""
        return self.first + self.tokens == len(self.entry.tokens)
