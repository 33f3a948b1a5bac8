"""The scheduler of a serving engine: which tokens of which requests a step computes, and in which cache pages.

Requests start in the order of arrival. Every step computes one token of each decoding request, oldest first, and uses
the rest of the token budget for prompts. When pages run out, the youngest request is preempted: its pages are freed, it
goes to the head of the queue, and its tokens are computed again later. A request takes pages from younger ones only. So
the oldest request always continues; since no request is accepted that exceeds the whole cache, every request becomes
the oldest at some time and finishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from quantforge.runtime.batching.generation_requests import GenerationRequest
from quantforge.runtime.cache import PagedCache
from quantforge.runtime.ragged_attention import Span
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.tree import DraftTree
from quantforge_kernels.kv import PAGE_SIZE


@dataclass(eq=False, slots=True)
class RequestState:
    """State of a waiting or running request.

    Attributes:
        request: the request.
        sampler: its sampler, whose state survives preemption.
        tokens: prompt tokens and new tokens so far.
        row: its cache row while it runs; None while it waits.
        scored: number of prompt tokens whose log-probabilities were reported.
    """

    request: GenerationRequest
    sampler: RowSampler
    tokens: list[int]
    row: int | None = None
    scored: int = 1  # the first follows nothing

    @property
    def new(self) -> tuple[int, ...]:
        """Return the new tokens so far."""
        return tuple(self.tokens[len(self.request.ids) :])


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one request that a step computes.

    Attributes:
        entry: state of the request.
        row: cache row of the request.
        first: position of the first token, equal to the number of cached tokens.
        tokens: number of tokens.
        tree: drafted tokens after them.
    """

    entry: RequestState
    row: int
    first: int
    tokens: int
    tree: DraftTree = field(default_factory=DraftTree)

    @property
    def ids(self) -> list[int]:
        """Return the token ids to compute, including drafted ones."""
        return [*self.entry.tokens[self.first : self.first + self.tokens], *self.tree.tokens]

    @property
    def span(self) -> Span:
        """Return the span of the ragged batch."""
        mask = None if self.tree.is_chain else self.tree.mask(root=True)
        return Span(self.row, self.tokens + len(self.tree.tokens), mask)

    @property
    def chooses_token(self) -> bool:
        """Return whether a new token is chosen after this step: no token of the request is left to compute."""
        return self.first + self.tokens == len(self.entry.tokens)

    @property
    def scores(self) -> bool:
        """Return whether the step yields requested prompt log-probabilities that were not reported yet."""
        entry, last = self.entry, min(self.first + self.tokens, len(self.entry.request.ids) - 1)
        return entry.request.prompt_logprobs is not None and last >= entry.scored


class Scheduler:
    """Scheduler of an engine: manages the queue and assigns cache rows and pages.

    Args:
        cache: the KV cache whose rows are assigned to requests.
        token_budget: most tokens of a step.
        chunk: most tokens of one prompt in a step.

    Attributes:
        waiting: requests without a cache row, in order of arrival.
        running: requests with a cache row, in order of arrival.
        preemptions: number of preemptions.
    """

    def __init__(self, cache: PagedCache, token_budget: int, chunk: int) -> None:
        self._cache = cache
        self._token_budget, self._chunk = token_budget, chunk
        self.preemptions = 0
        self._rows = list(range(cache.sequences))[::-1]
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []

    def plan(self) -> list[Work]:
        """Select the work of the next step and reserve its cache pages."""
        work: dict[RequestState, Work] = {}
        budget = self._token_budget
        for entry in tuple(self.running):
            if (
                entry.row is not None
                and self._tokens_left(entry) == 1
                and self._schedule_tokens(entry, 1, work)
            ):
                budget -= 1
        for entry in self._prompt_requests(work):
            num_tokens = max(0, min(self._tokens_left(entry), budget, self._chunk))
            budget -= self._schedule_tokens(entry, num_tokens, work)
            if budget < 1:
                break
        return list(work.values())

    def finish(self, entry: RequestState) -> None:
        """Remove a finished or canceled request and free its row and pages."""
        if entry.row is None:
            self.waiting.remove(entry)
        else:
            self._release(entry)

    def _release(self, entry: RequestState) -> None:
        """Free the row and pages of a request."""
        assert entry.row is not None
        self._cache.release(entry.row)
        self._rows.append(entry.row)
        entry.row = None
        self.running.remove(entry)

    def _prompt_requests(self, work: dict[RequestState, Work]) -> Iterator[RequestState]:
        """Yield the requests with prompt tokens left to compute; then admit waiting requests that fit."""
        for entry in tuple(self.running):
            if entry.row is not None and entry not in work and self._tokens_left(entry) > 1:
                yield entry
        while self._admit():
            yield self.running[-1]

    def _tokens_left(self, entry: RequestState) -> int:
        assert entry.row is not None
        return len(entry.tokens) - self._cache.length(entry.row)

    def _admit(self) -> bool:
        """Start the first waiting request if a row and enough pages are free; return whether it was started."""
        if not self.waiting or not self._rows:
            return False
        entry = self.waiting[0]
        reserved_pages = sum(
            self._cache.pages_needed(other.row, len(other.tokens))
            for other in self.running
            if other.row is not None
        )
        # Room for one more token, and a spare page for each running request, to avoid an early preemption. The last
        # token of a request is never computed.
        max_computed = len(entry.request.ids) + entry.request.new_tokens - 1
        needed_pages = -(-min(len(entry.tokens) + 1, max_computed) // PAGE_SIZE) + len(self.running)
        if reserved_pages + needed_pages > self._cache.free_pages:
            return False
        entry.row = self._rows.pop()
        self.running.append(self.waiting.pop(0))
        return True

    def _schedule_tokens(
        self, entry: RequestState, tokens: int, work: dict[RequestState, Work]
    ) -> int:
        """Schedule the next tokens of a request, as many as pages allow; return their number."""
        cache, row = self._cache, entry.row
        assert row is not None
        start = cache.length(row)
        while cache.pages_needed(row, start + tokens) > cache.free_pages:
            if self.running[-1] is entry:  # those before it are older
                free_tokens = (len(cache.pages_of(row)) + cache.free_pages) * PAGE_SIZE - start
                tokens = min(tokens, free_tokens)
                break
            self._preempt(self.running[-1], work)
        if tokens > 0:
            cache.reserve(row, start + tokens)
            work[entry] = Work(entry, row, start, tokens)
        return max(tokens, 0)

    def _preempt(self, entry: RequestState, work: dict[RequestState, Work]) -> None:
        """Preempt the youngest request: free its pages and put it at the head of the queue."""
        work.pop(entry, None)
        self._release(entry)
        self.waiting.insert(0, entry)
        self.preemptions += 1
