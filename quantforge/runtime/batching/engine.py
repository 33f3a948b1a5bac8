"""An engine: requests are submitted at any time, and every step computes a part of many of them at once.

    engine = ServingEngine(decoder, EngineOptions(rows=16, pages=2048))
    engine.submit(GenerationRequest("a", ids, new_tokens=64))
    while not engine.idle:
        for happened in engine.step():
            ...

A step asks the scheduler what to compute, sends those tokens through the model as one ragged batch, and chooses the
next token of each request whose tokens are then all computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor

from quantforge.errors import InputError, UsageError
from quantforge.runtime.batching.generation_requests import (
    Finished,
    FinishReason,
    GenerationRequest,
    Happening,
    NewToken,
    PromptScored,
)
from quantforge.runtime.batching.scheduler import Scheduler, ServedEntry, Work
from quantforge.runtime.cache import PagedCache
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import EngineSteps
from quantforge.runtime.sampling import Chosen, RowSampler, log_probabilities
from quantforge.runtime.speculation.decode import Pace, SpeculativeDecoder
from quantforge.runtime.speculation.drafter import Drafter
from quantforge.runtime.speculation.options import FOR_ONE_TEXT
from quantforge.runtime.speculation.verify import SpeculationCounts, Verified, verify
from quantforge_kernels.kv import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
        rows: most requests that are computed at a time.
        tokens: most tokens of a request, old and new; None: the positions of the model.
        pages: of the cache, `quantforge_kernels.kv.PAGE_SIZE` tokens each; None: enough for every row to be full.
        cache: kind of the cache, see `quantforge.cache_kinds`.
        token_budget: most tokens of a step, at least one for each row; running requests take theirs first, prompts
            share the rest.
        chunk: most tokens of one prompt in a step.
    """

    rows: int = 16
    tokens: int | None = None
    pages: int | None = None
    cache: str = ""
    token_budget: int = 512
    chunk: int = 96


@dataclass(slots=True)
class Counters:
    """Counts of what happened, and the state after the last step.

    Attributes:
        steps: computed.
        computed_tokens: that went through the model.
        new_tokens: chosen.
        finished: requests by reason.
        preemptions: requests that had to give back their pages.
        scheduling_seconds: spent on deciding and keeping books, without the model and the choice of tokens.
        step_seconds: spent in steps.
        waiting, running: requests.
        pages, pages_free: of the cache.
        speculation: what came of drafted tokens.
        reserved_tokens, used_tokens: places in the pages of running requests, and those in use.
    """

    steps: int = 0
    computed_tokens: int = 0
    new_tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    preemptions: int = 0
    scheduling_seconds: float = 0.0
    step_seconds: float = 0.0
    waiting: int = 0
    running: int = 0
    pages: int = 0
    pages_free: int = 0
    reserved_tokens: int = 0
    used_tokens: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)


class ServingEngine:
    """Requests on one model, many at a time. Its methods are called by one thread.

    Args:
        decoder: the model.
        options: its room and the tokens of a step.
        speculative: the model with its drafter, whose tokens steps check together; None without.

    Attributes:
        cache: its keys and values.

    Raises:
        InputError: a request may have more tokens than the model has positions.
        UsageError: no such kind of cache.
        ResourceError: a GPU has no room for the cache.
    """

    def __init__(
        self,
        decoder: Decoder,
        options: EngineOptions | None = None,
        speculative: SpeculativeDecoder | None = None,
    ) -> None:
        options = options or EngineOptions()
        tokens = options.tokens or decoder.positions
        if tokens > decoder.positions:
            raise InputError(
                f"requests of {tokens} tokens: the model has {decoder.positions} positions",
                f"set tokens to at most {decoder.positions}",
            )
        self._decoder = decoder
        self.cache = decoder.cache(
            options.rows, tokens, options.cache, options.pages, options.chunk
        )
        self._decoding: EngineSteps | None = None
        if isinstance(decoder, Decoder):  # else of a test, which computes ragged batches alone
            self._decoding = EngineSteps(decoder, self.cache)
        self._counters = Counters(pages=self.cache.pages)
        self._drafts: StepDrafts | None = None
        if speculative is not None:
            counts = self._counters.speculation
            self._drafts = StepDrafts(speculative, self.cache, options.token_budget, counts)
        self._scheduler = Scheduler(self.cache, options.token_budget, options.chunk)
        self._entries: dict[str, ServedEntry] = {}
        self._happened: list[Happening] = []

    @property
    def idle(self) -> bool:
        """Return whether nothing is left to compute or to report."""
        return not self._entries and not self._happened

    @property
    def room(self) -> int:
        """Return the most tokens of a request, old and new; the last one is never stored."""
        return min(self.cache.most_tokens, PAGE_SIZE * self.cache.pages + 1)

    @property
    def counters(self) -> Counters:
        """Return the counts up to now."""
        cache, running = self.cache, self._scheduler.running
        rows = [entry.row for entry in running if entry.row is not None]
        return replace(
            self._counters,
            finished=self._counters.finished.copy(),
            preemptions=self._scheduler.preemptions,
            waiting=len(self._scheduler.waiting),
            running=len(rows),
            pages_free=cache.free,
            reserved_tokens=PAGE_SIZE * sum(len(cache.held(row)) for row in rows),
            used_tokens=sum(cache.length(row) for row in rows),
        )

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request: of at least one token that the model knows, with an id that no other has.

        Raises:
            InputError: it can never fit.
        """
        assert min(len(request.ids), request.new_tokens) > 0
        assert request.id not in self._entries
        if len(request.ids) + request.new_tokens > self.room:
            raise InputError(
                f"request {request.id!r} of {len(request.ids)} tokens and {request.new_tokens} new ones can never "
                f"fit: there is room for {self.room}",
                "shorten the prompt, ask for fewer tokens, or give the engine more pages",
            )
        sampler = RowSampler(request.sampling, request.ids)
        entry = ServedEntry(request, sampler, list(request.ids))
        self._entries[request.id] = entry
        self._scheduler.waiting.append(entry)

    def cancel(self, id: str) -> bool:  # noqa: A002 (the name of the field)
        """End a request, wherever it is; the next step reports it. Return whether there was one."""
        entry = self._entries.get(id)
        if entry is None:
            return False
        self._end(entry, FinishReason.CANCELLED)
        return True

    @torch.inference_mode()
    def step(self) -> list[Happening]:
        """Compute one step, and return what has happened since the last one, in order."""
        started = perf_counter()
        work = self._scheduler.plan()
        if work:
            planned = perf_counter()
            if self._drafts is not None:
                work = self._drafts.add(work)
            parts = [part for part in work if part.chooses]
            logits = self._logits(work)
            verified = [] if logits is None else _verify(logits, parts)
            away = perf_counter() - planned
            self._settle(parts, verified)
            ended = perf_counter()
            if self._drafts is not None:
                self._drafts.took(ended - started, verified)
            counters = self._counters
            counters.steps += 1
            counters.computed_tokens += sum(len(part.ids) for part in work)
            counters.step_seconds += ended - started
            counters.scheduling_seconds += ended - started - away
        happened, self._happened = self._happened, []
        return happened

    def _settle(self, parts: Sequence[Work], verified: Sequence[Verified]) -> None:
        """Keep the drafted tokens that were right, and hand out all tokens that were chosen."""
        for part, one in zip(parts, verified, strict=True):
            if part.tree.tokens:
                tokens = part.first + part.tokens
                self.cache.keep_path(part.row, tokens - 1, [0, *(node + 1 for node in one.path)])
                self.cache.shorten(part.row, tokens + len(one.path))  # frees pages of the others
            for chosen in one.chosen:
                self._accept(part.entry, chosen)

    def _logits(self, work: list[Work]) -> Tensor | None:
        """Return the logits of all work that chooses a token, as `verify` takes them, if any does."""
        ids: list[int] = []
        rows: list[int] = []
        for part in work:
            ids += part.ids
            if part.chooses:
                rows += range(len(ids) - 1 - len(part.tree.tokens), len(ids))
        plain = len(rows) == len(work) == len(ids)  # each part decodes one token
        if self._decoding is not None and plain:
            return self._decoding(ids, [part.row for part in work])
        device = self._decoder.device
        spans = [part.span for part in work]
        hidden = self._decoder.hidden_of(torch.tensor(ids, device=device), spans, self.cache)
        self._score(work, hidden)
        return self._decoder.logits(hidden[torch.tensor(rows, device=device)]) if rows else None

    def _score(self, work: list[Work], hidden: Tensor) -> None:
        """Report log-probabilities of prompts that ask for them."""
        row = 0
        for part in work:
            if part.scores:
                entry, first = part.entry, part.first + 1
                ids = entry.request.ids[first : first + part.tokens]
                logits = self._decoder.logits(hidden[row : row + part.tokens])
                counts = [entry.request.prompt_logprobs or 0] * len(ids)
                tokens = log_probabilities(logits[: len(ids)], ids, counts)
                tokens = tokens[entry.scored - first :]  # not again after a preemption
                self._happened.append(PromptScored(entry.request.id, entry.scored, tuple(tokens)))
                entry.scored += len(tokens)
            row += part.tokens

    def _accept(self, entry: ServedEntry, chosen: Chosen | InputError) -> None:
        request = entry.request
        if isinstance(chosen, InputError):
            self._end(entry, FinishReason.ERROR, str(chosen))
            return
        token = chosen.token
        entry.tokens.append(token)
        self._counters.new_tokens += 1
        place = len(entry.tokens) - len(request.ids)
        self._happened.append(NewToken(request.id, token, place - 1, chosen.logprob, chosen.top))
        if token in request.stop:
            self._end(entry, FinishReason.STOP)
        elif place == request.new_tokens:
            self._end(entry, FinishReason.LENGTH)

    def _end(self, entry: ServedEntry, reason: FinishReason, error: str = "") -> None:
        self._happened.append(Finished(entry.request.id, reason, entry.new, error))
        self._counters.finished[reason] += 1
        del self._entries[entry.request.id]
        if self._drafts is not None:
            self._drafts.forget(entry)
        self._scheduler.finish(entry)


def _verify(logits: Tensor, parts: Sequence[Work]) -> list[Verified]:
    """Choose the next tokens of parts of a step."""
    entries = [part.entry for part in parts]
    return verify(
        logits,
        [entry.sampler for entry in entries],
        [part.tree for part in parts],
        [entry.request.stop for entry in entries],
    )


class StepDrafts:
    """Drafted tokens for the steps of an engine.

    Args:
        speculative: who drafts.
        cache: of the engine.
        budget: most tokens of a step.
        counts: to count in.

    Raises:
        UsageError: drafters that need what the model computes of one text.
    """

    def __init__(
        self,
        speculative: SpeculativeDecoder,
        cache: PagedCache,
        budget: int,
        counts: SpeculationCounts,
    ) -> None:
        if speculative.drafter(1).taps is not None:
            raise UsageError(*FOR_ONE_TEXT)
        self._speculative, self._cache = speculative, cache
        self._budget, self._counts = budget, counts
        self._drafters: dict[str, Drafter] = {}
        self._pace: Pace | None = None  # of the step; None: it may have no drafted tokens

    def add(self, work: Sequence[Work]) -> list[Work]:
        """Return the work of a step with drafted tokens; pages for them are reserved."""
        self._pace = None
        if not all(part.chooses and part.tokens == 1 for part in work):
            return list(work)
        self._pace = self._speculative.pace(len(work))
        most = min(self._pace.tokens(), self._budget // len(work) - 1)
        return [self._with_draft(part, most) for part in work]

    def took(self, seconds: float, verified: Sequence[Verified]) -> None:
        """Note what a step took, drafting included, and what came of it."""
        if self._pace is None:
            return
        depth = max(one.tree.depth for one in verified)
        self._pace.took(depth, seconds)
        for one in verified:
            self._counts.count(one)
            if depth:  # a request without drafted tokens gains nothing of what the others cost
                missed = one.missed or not one.tree.drafted
                self._pace.judged(len(one.path), missed=missed)

    def forget(self, entry: ServedEntry) -> None:
        """Drop the drafter of a request that has ended."""
        self._drafters.pop(entry.request.id, None)

    def _with_draft(self, part: Work, most: int) -> Work:
        request, cache = part.entry.request, self._cache
        depth = min(most, request.new_tokens - len(part.entry.new) - 1)
        if depth < 1:
            return part
        if request.id not in self._drafters:
            room = len(request.ids) + request.new_tokens
            self._drafters[request.id] = self._speculative.drafter(room)
        try:
            tree = self._drafters[request.id].draft(part.entry.tokens, depth, part.entry.sampler)
        except InputError:  # a draft's logits are not finite: the model's own may be
            return part
        tokens = part.first + 1 + len(tree.tokens)
        ahead = cache.layout.ahead if cache.layout.rings else tokens
        fits = tokens <= cache.most_tokens and len(tree.tokens) < ahead
        if not fits or cache.wanted(part.row, tokens) > cache.free:
            return part
        cache.reserve(part.row, tokens)
        return replace(part, tree=tree)
