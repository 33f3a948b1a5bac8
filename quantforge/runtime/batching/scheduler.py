"""The scheduler: which tokens of which requests a step computes, and in which pages.

First come, first served: requests begin in the order in which they came, and none overtakes one that waits. Every
step takes one token of each request that is past its prompt, oldest first, and gives what is left of the budget to
prompts. When pages run out, the youngest request gives all of its own back and waits at the head of the queue, to be
computed again from its tokens; a request takes pages from younger ones only. So the oldest always continues, and since
no request is accepted that the whole cache would not hold, each is the oldest at some time and finishes.
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
class ServedEntry:
    """A request that waits, or is computed in a row of the cache.

    Attributes:
        request: it.
        sampler: chooses its tokens; continues where it was when the request has to be computed again.
        tokens: of the prompt, and those chosen since.
        row: of the cache, while it is computed.
        scored: tokens of the prompt whose log-probabilities were reported.
    """

    request: GenerationRequest
    sampler: RowSampler
    tokens: list[int]
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
        """Return whether it computes log-probabilities of the prompt that are asked for and not reported yet."""
        entry, last = self.entry, min(self.first + self.tokens, len(self.entry.request.ids) - 1)
        return entry.request.prompt_logprobs is not None and last >= entry.scored


class Scheduler:
    """Queue, rows and pages of an engine.

    Args:
        cache: its rows are given to requests.
        token_budget: most tokens of a step.
        chunk: most tokens of one prompt in a step.

    Attributes:
        waiting: entries without a row, in the order in which they came.
        running: entries with one, likewise.
        preemptions: how often a request had to give back its pages.
    """

    def __init__(self, cache: PagedCache, token_budget: int, chunk: int) -> None:
        self._cache = cache
        self._token_budget, self._chunk = token_budget, chunk
        self.preemptions = 0
        self._rows = list(range(cache.sequences))[::-1]
        self.waiting: list[ServedEntry] = []
        self.running: list[ServedEntry] = []

    def plan(self) -> list[Work]:
        """Decide on a step, and reserve the pages it needs."""
        work: dict[ServedEntry, Work] = {}
        budget = self._token_budget
        for entry in tuple(self.running):
            if entry.row is not None and self._left(entry) == 1 and self._take(entry, 1, work):
                budget -= 1
        for entry in self._prompts(work):
            portion = max(0, min(self._left(entry), budget, self._chunk))
            budget -= self._take(entry, portion, work)
            if budget < 1:
                break
        return list(work.values())

    def finish(self, entry: ServedEntry) -> None:
        """Forget an entry that has ended, or was canceled."""
        if entry.row is None:
            self.waiting.remove(entry)
        else:
            self._release(entry)

    def _release(self, entry: ServedEntry) -> None:
        """Take an entry's row and pages from it."""
        assert entry.row is not None
        self._cache.release(entry.row)
        self._rows.append(entry.row)
        entry.row = None
        self.running.remove(entry)

    def _prompts(self, work: dict[ServedEntry, Work]) -> Iterator[ServedEntry]:
        """Yield entries of whose tokens several are left, those first that began; admit others as long as they fit."""
        for entry in tuple(self.running):
            if entry.row is not None and entry not in work and self._left(entry) > 1:
                yield entry
        while self._admit():
            yield self.running[-1]

    def _left(self, entry: ServedEntry) -> int:
        assert entry.row is not None
        return len(entry.tokens) - self._cache.length(entry.row)

    def _admit(self) -> bool:
        """Give the first that waits a row, if there is one, and pages; return whether it was."""
        if not self.waiting or not self._rows:
            return False
        entry = self.waiting[0]
        promised = sum(
            self._cache.wanted(other.row, len(other.tokens))
            for other in self.running
            if other.row is not None
        )
        # One token more than now, and a page for each that runs, so that it need not soon give its own back. The last
        # token of a request is never computed.
        most = len(entry.request.ids) + entry.request.new_tokens - 1
        needed = -(-min(len(entry.tokens) + 1, most) // PAGE_SIZE) + len(self.running)
        if promised + needed > self._cache.free:
            return False
        entry.row = self._rows.pop()
        self.running.append(self.waiting.pop(0))
        return True

    def _take(self, entry: ServedEntry, tokens: int, work: dict[ServedEntry, Work]) -> int:
        """Reserve pages for the next tokens of an entry, or for fewer where there are none; return how many."""
        cache, row = self._cache, entry.row
        assert row is not None
        first = cache.length(row)
        while cache.wanted(row, first + tokens) > cache.free:
            if self.running[-1] is entry:  # those before it are older
                fits = (len(cache.held(row)) + cache.free) * PAGE_SIZE - first
                tokens = min(tokens, fits)
                break
            self._preempt(self.running[-1], work)
        if tokens > 0:
            cache.reserve(row, first + tokens)
            work[entry] = Work(entry, row, first, tokens)
        return max(tokens, 0)

    def _preempt(self, entry: ServedEntry, work: dict[ServedEntry, Work]) -> None:
        """Take the pages of the youngest; it waits before all others."""
        work.pop(entry, None)
        self._release(entry)
        self.waiting.insert(0, entry)
        self.preemptions += 1
