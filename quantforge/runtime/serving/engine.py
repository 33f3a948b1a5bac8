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

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.runtime.cache import PagedCache
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.ragged import Span
from quantforge.runtime.sampling import Chosen, RowSampler
from quantforge.runtime.serving.choosing import choose, score
from quantforge.runtime.serving.counters import Counters
from quantforge.runtime.serving.decoding_steps import DecodingSteps
from quantforge.runtime.serving.engine_options import EngineOptions
from quantforge.runtime.serving.entries import ServedEntry, Work
from quantforge.runtime.serving.generation_requests import (
    Finished,
    FinishReason,
    GenerationRequest,
    Happening,
    NewToken,
    PromptScored,
    check_request,
)
from quantforge.runtime.serving.scheduler import Scheduler
from quantforge_kernels.kv import PAGE


class ServedDecoder(Protocol):
    """Needs of an engine: `quantforge.runtime.decoder.Decoder`, where methods are described."""

    positions: int
    vocabulary: int
    device: torch.device

    def cache(
        self,
        sequences: int,
        tokens: int,
        kind: str = "",
        pages: int | None = None,
        ahead: int = 0,
    ) -> PagedCache:
        """Make a cache."""

    def hidden_of(self, ids: Tensor, spans: Sequence[Span], cache: PagedCache) -> Tensor:
        """Compute spans of new tokens."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits."""


class ServingEngine:
    """Requests on one model, many at a time. Its methods are called by one thread.

    Args:
        decoder: the model.
        options: room and switches.

    Attributes:
        cache: its keys and values.

    Raises:
        InputError: a request may have more tokens than the model has positions.
        UsageError: no such kind of cache.
        ResourceError: a GPU has no room for the cache.
    """

    def __init__(self, decoder: ServedDecoder, options: EngineOptions | None = None) -> None:
        options = options or EngineOptions()
        tokens = options.tokens or decoder.positions
        if tokens > decoder.positions:
            raise InputError(
                f"requests of {tokens} tokens: the model has {decoder.positions} positions",
                f"set tokens to at most {decoder.positions}",
            )
        self._decoder = decoder
        self.cache = decoder.cache(
            options.rows, tokens, options.cache, options.pages, options.ahead
        )
        self._decoding: DecodingSteps | None = None
        if options.recorded and isinstance(decoder, Decoder):
            self._decoding = DecodingSteps(decoder, self.cache)
        self._counters = Counters(pages=self.cache.pool.pages)
        self._scheduler = Scheduler(self.cache, options, self._counters)
        self._entries: dict[str, ServedEntry] = {}
        self._order = 0
        self._happened: list[Happening] = []

    @property
    def idle(self) -> bool:
        """Return whether nothing is left to compute or to tell."""
        return not self._entries and not self._happened

    @property
    def room(self) -> int:
        """Return the most tokens of a request, old and new; the last one is never stored."""
        return min(self.cache.most_tokens, PAGE * self.cache.pool.pages + 1)

    @property
    def counters(self) -> Counters:
        """Return the counts up to now."""
        cache, running = self.cache, self._scheduler.running
        rows = [entry.row for entry in running if entry.row is not None]
        return replace(
            self._counters,
            finished=self._counters.finished.copy(),
            waiting=len(self._scheduler.waiting),
            running=len(rows),
            pages_free=cache.pool.free,
            pages_kept=cache.pool.idle,
            reserved_tokens=PAGE * sum(len(cache.held(row)) for row in rows),
            used_tokens=sum(cache.length(row) for row in rows),
        )

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            InputError: it has no token, a token that the model does not know, or the id of another; nothing is to
                follow; or it can never fit.
        """
        if request.id in self._entries:
            raise InputError(f"there is a request {request.id!r} already", "give each its own id")
        check_request(request, self._decoder.vocabulary, self.room)
        entry = ServedEntry(
            request, self._order, RowSampler(request.sampling, request.ids), list(request.ids)
        )
        self._order += 1
        self._entries[request.id] = entry
        self._scheduler.waiting.append(entry)

    def cancel(self, id: str) -> bool:  # noqa: A002 (the name of the field)
        """End a request, wherever it is; the next step tells. Return whether there was one."""
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
            chosen, away = self._compute(work)
            self._scheduler.note(work)
            for part, token in chosen:
                self._accept(part.entry, token)
            ended = perf_counter()
            counters = self._counters
            counters.steps += 1
            counters.computed_tokens += sum(part.tokens for part in work)
            counters.step_seconds += ended - started
            counters.scheduling_seconds += ended - started - away
        happened, self._happened = self._happened, []
        return happened

    def _compute(self, work: list[Work]) -> tuple[list[tuple[Work, Chosen | InputError]], float]:
        """Return the next tokens of all work that chooses one, and the seconds in model and choice."""
        started = perf_counter()
        choosing = [part for part in work if part.chooses]
        logits = self._logits(work)
        chosen: list[Chosen | InputError] = []
        if logits is not None:
            chosen = choose(logits, [part.entry for part in choosing])
        return list(zip(choosing, chosen, strict=True)), perf_counter() - started

    def _logits(self, work: list[Work]) -> Tensor | None:
        """Return the logits ``[choosing, vocabulary]`` of all work that chooses a token, if any does."""
        ids: list[int] = []
        last: list[int] = []
        for part in work:
            ids += part.entry.tokens[part.first : part.first + part.tokens]
            if part.chooses:
                last.append(len(ids) - 1)
        if self._decoding is not None and len(ids) == len(last):
            return self._decoding(ids, [part.row for part in work])
        spans = [Span(part.row, part.tokens) for part in work]
        device = self._decoder.device
        hidden = self._decoder.hidden_of(torch.tensor(ids, device=device), spans, self.cache)
        self._score(work, hidden)
        return self._decoder.logits(hidden[torch.tensor(last, device=device)]) if last else None

    def _score(self, work: list[Work], hidden: Tensor) -> None:
        """Tell log-probabilities of prompts, of those that ask for them."""
        first = 0
        for part in work:
            if part.scores:
                entry = part.entry
                told = score(self._decoder.logits(hidden[first : first + part.tokens]), part)
                told = told[entry.scored - part.first - 1 :]  # not again after a preemption
                self._happened.append(PromptScored(entry.request.id, entry.scored, tuple(told)))
                entry.scored += len(told)
            first += part.tokens

    def _accept(self, entry: ServedEntry, chosen: Chosen | InputError) -> None:
        if entry.done:
            return
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
        self._scheduler.finish(entry, early=reason in (FinishReason.CANCELLED, FinishReason.ERROR))
