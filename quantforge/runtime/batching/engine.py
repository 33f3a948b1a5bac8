"""A continuous-batching engine: requests are submitted at any time, and every step computes a part of many of them.

    engine = ServingEngine(decoder, EngineOptions(rows=16, pages=2048))
    engine.submit(GenerationRequest("a", ids, new_tokens=64))
    while not engine.idle:
        for event in engine.step():
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
    EngineEvent,
    Finished,
    FinishReason,
    GenerationRequest,
    NewToken,
    PromptScored,
)
from quantforge.runtime.batching.scheduler import RequestState, Scheduler, Work
from quantforge.runtime.cache import PagedCache
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import BatchedSteps
from quantforge.runtime.sampling import ChosenToken, RowSampler, with_log_probabilities
from quantforge.runtime.speculation.decode import DraftLengthController, SpeculativeDecoder
from quantforge.runtime.speculation.draft_options import SINGLE_TEXT_ERROR
from quantforge.runtime.speculation.drafter import Drafter
from quantforge.runtime.speculation.verify_drafts import SpeculationCounts, VerifiedDraft, verify
from quantforge_kernels.kv import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of a serving engine.

    Attributes:
        rows: most requests that run at a time.
        tokens: most tokens of a request, prompt and new ones; None for the context length of the model.
        pages: number of cache pages of `quantforge_kernels.kv.PAGE_SIZE` tokens; None for enough to fill every row.
        cache: kind of the KV cache, see `quantforge.cache_kinds`.
        token_budget: most tokens of a step, at least one for each row; decoding requests come first, prompts share the
            rest.
        chunk: most tokens of one prompt in a step.
    """

    rows: int = 16
    tokens: int | None = None
    pages: int | None = None
    cache: str = ""
    token_budget: int = 512
    chunk: int = 96


@dataclass(slots=True)
class EngineCounters:
    """Statistics of an engine, and its state after the last step.

    Attributes:
        steps: number of steps.
        computed_tokens: tokens that went through the model.
        new_tokens: generated tokens.
        finished: number of finished requests by reason.
        preemptions: how often a request lost its pages and had to wait again.
        scheduling_seconds: time spent on scheduling and bookkeeping, without the model and sampling.
        step_seconds: total time of the steps.
        waiting, running: number of waiting and running requests.
        pages, pages_free: total and free pages of the cache.
        speculation: statistics of speculative decoding.
        reserved_tokens, used_tokens: slots in the pages of running requests, and how many of them are in use.
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
    """Engine that serves many requests with one model by continuous batching; not thread-safe.

    Args:
        decoder: the model.
        options: capacity and step size.
        speculative: the model with its drafter, for speculative decoding; None for plain decoding.

    Attributes:
        cache: the KV cache.

    Raises:
        InputError: ``options.tokens`` exceeds the context length of the model.
        UsageError: the cache kind is unknown.
        ResourceError: the cache does not fit into GPU memory.
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
        self._decoding_steps: BatchedSteps | None = None
        if isinstance(decoder, Decoder):  # else of a test, which computes ragged batches alone
            self._decoding_steps = BatchedSteps(decoder, self.cache)
        self._counters = EngineCounters(pages=self.cache.pages)
        self._drafter: StepDrafter | None = None
        if speculative is not None:
            counts = self._counters.speculation
            self._drafter = StepDrafter(speculative, self.cache, options.token_budget, counts)
        self._scheduler = Scheduler(self.cache, options.token_budget, options.chunk)
        self._entries: dict[str, RequestState] = {}
        self._pending_events: list[EngineEvent] = []

    @property
    def idle(self) -> bool:
        """Return whether nothing is left to compute or to report."""
        return not self._entries and not self._pending_events

    @property
    def max_request_tokens(self) -> int:
        """Return the most tokens of a request, prompt and new ones; the last token is never stored."""
        return min(self.cache.max_tokens, PAGE_SIZE * self.cache.pages + 1)

    @property
    def counters(self) -> EngineCounters:
        """Return the current statistics."""
        cache, running_requests = self.cache, self._scheduler.running
        rows = [entry.row for entry in running_requests if entry.row is not None]
        return replace(
            self._counters,
            finished=self._counters.finished.copy(),
            preemptions=self._scheduler.preemptions,
            waiting=len(self._scheduler.waiting),
            running=len(rows),
            pages_free=cache.free_pages,
            reserved_tokens=PAGE_SIZE * sum(len(cache.pages_of(row)) for row in rows),
            used_tokens=sum(cache.length(row) for row in rows),
        )

    def submit(self, request: GenerationRequest) -> None:
        """Add a request to the queue; it needs a non-empty prompt of valid tokens and a unique id.

        Raises:
            InputError: the request exceeds the capacity of the engine.
        """
        assert min(len(request.ids), request.new_tokens) > 0
        assert request.id not in self._entries
        if len(request.ids) + request.new_tokens > self.max_request_tokens:
            raise InputError(
                f"request {request.id!r} of {len(request.ids)} tokens and {request.new_tokens} new ones can never "
                f"fit: there is room for {self.max_request_tokens}",
                "shorten the prompt, ask for fewer tokens, or give the engine more pages",
            )
        sampler = RowSampler(request.sampling, request.ids)
        entry = RequestState(request, sampler, list(request.ids))
        self._entries[request.id] = entry
        self._scheduler.waiting.append(entry)

    def cancel(self, id: str) -> bool:  # noqa: A002 (the name of the field)
        """Cancel a waiting or running request, which the next step reports; return whether it existed."""
        entry = self._entries.get(id)
        if entry is None:
            return False
        self._finish(entry, FinishReason.CANCELLED)
        return True

    @torch.inference_mode()
    def step(self) -> list[EngineEvent]:
        """Compute one step; return the events since the last step, in order."""
        start_time = perf_counter()
        work = self._scheduler.plan()
        if work:
            planned = perf_counter()
            if self._drafter is not None:
                work = self._drafter.add(work)
            choosing = [item for item in work if item.chooses_token]
            logits = self._logits(work)
            verified = [] if logits is None else _choose_tokens(logits, choosing)
            model_seconds = perf_counter() - planned
            self._record_chosen(choosing, verified)
            end_time = perf_counter()
            if self._drafter is not None:
                self._drafter.record_time(end_time - start_time, verified)
            counters = self._counters
            counters.steps += 1
            counters.computed_tokens += sum(len(item.ids) for item in work)
            counters.step_seconds += end_time - start_time
            counters.scheduling_seconds += end_time - start_time - model_seconds
        events, self._pending_events = self._pending_events, []
        return events

    def _record_chosen(self, choosing: Sequence[Work], verified: Sequence[VerifiedDraft]) -> None:
        """Keep the cache entries of accepted drafted tokens, free the others, and record all chosen tokens."""
        for item, result in zip(choosing, verified, strict=True):
            if item.tree.tokens:
                tokens = item.first + item.tokens
                self.cache.keep_tree_path(
                    item.row, tokens - 1, [0, *(node + 1 for node in result.path)]
                )
                self.cache.truncate_sequence(
                    item.row, tokens + len(result.path)
                )  # frees pages of the others
            for chosen_token in result.chosen:
                self._accept(item.entry, chosen_token)

    def _logits(self, step_work: list[Work]) -> Tensor | None:
        """Compute the scheduled tokens; return the logits for `verify`, or None if no request needs a new token."""
        ids: list[int] = []
        rows: list[int] = []
        for item in step_work:
            ids += item.ids
            if item.chooses_token:
                rows += range(len(ids) - 1 - len(item.tree.tokens), len(ids))
        is_decode_only = len(rows) == len(step_work) == len(ids)  # each part decodes one token
        if self._decoding_steps is not None and is_decode_only:
            return self._decoding_steps(ids, [item.row for item in step_work])
        device = self._decoder.device
        spans = [item.span for item in step_work]
        hidden = self._decoder.hidden_of_spans(torch.tensor(ids, device=device), spans, self.cache)
        self._record_prompt_logprobs(step_work, hidden)
        return self._decoder.logits(hidden[torch.tensor(rows, device=device)]) if rows else None

    def _record_prompt_logprobs(self, step_work: list[Work], hidden: Tensor) -> None:
        """Record the requested log-probabilities of prompt tokens."""
        row = 0
        for item in step_work:
            if item.scores:
                entry, first = item.entry, item.first + 1
                ids = entry.request.ids[first : first + item.tokens]
                logits = self._decoder.logits(hidden[row : row + item.tokens])
                counts = [entry.request.prompt_logprobs or 0] * len(ids)
                tokens = with_log_probabilities(logits[: len(ids)], ids, counts)
                tokens = tokens[entry.scored - first :]  # not again after a preemption
                self._pending_events.append(
                    PromptScored(entry.request.id, entry.scored, tuple(tokens))
                )
                entry.scored += len(tokens)
            row += item.tokens

    def _accept(self, entry: RequestState, chosen_token: ChosenToken | InputError) -> None:
        request = entry.request
        if isinstance(chosen_token, InputError):
            self._finish(entry, FinishReason.ERROR, str(chosen_token))
            return
        token = chosen_token.token
        entry.tokens.append(token)
        self._counters.new_tokens += 1
        position = len(entry.tokens) - len(request.ids)
        self._pending_events.append(
            NewToken(request.id, token, position - 1, chosen_token.logprob, chosen_token.top)
        )
        if token in request.stop:
            self._finish(entry, FinishReason.STOP)
        elif position == request.new_tokens:
            self._finish(entry, FinishReason.LENGTH)

    def _finish(self, entry: RequestState, reason: FinishReason, error: str = "") -> None:
        self._pending_events.append(Finished(entry.request.id, reason, entry.new, error))
        self._counters.finished[reason] += 1
        del self._entries[entry.request.id]
        if self._drafter is not None:
            self._drafter.remove(entry)
        self._scheduler.finish(entry)


def _choose_tokens(logits: Tensor, choosing: Sequence[Work]) -> list[VerifiedDraft]:
    """Choose the next tokens of all scheduled requests."""
    entries = [item.entry for item in choosing]
    return verify(
        logits,
        [entry.sampler for entry in entries],
        [item.tree for item in choosing],
        [entry.request.stop for entry in entries],
    )


class StepDrafter:
    """Adds drafted tokens to the steps of an engine, and adapts their number to measured times.

    Args:
        speculative: the model and its draft method.
        cache: KV cache of the engine.
        budget: most tokens of a step.
        counts: statistics to update.

    Raises:
        UsageError: the draft method works for a single text only.
    """

    def __init__(
        self,
        speculative: SpeculativeDecoder,
        cache: PagedCache,
        budget: int,
        counts: SpeculationCounts,
    ) -> None:
        if speculative.drafter(1).taps is not None:
            raise UsageError(*SINGLE_TEXT_ERROR)
        self._speculative, self._cache = speculative, cache
        self._budget, self._counts = budget, counts
        self._drafters: dict[str, Drafter] = {}
        # The controller of the step; None: it may have no drafted tokens
        self._pace: DraftLengthController | None = None

    def add(self, work: Sequence[Work]) -> list[Work]:
        """Add drafted tokens to the work of a step, and reserve cache pages for them."""
        self._pace = None
        if not all(item.chooses_token and item.tokens == 1 for item in work):
            return list(work)
        self._pace = self._speculative.pace(len(work))
        max_drafted = min(self._pace.next_length(), self._budget // len(work) - 1)
        return [self._with_draft(item, max_drafted) for item in work]

    def record_time(self, seconds: float, verified: Sequence[VerifiedDraft]) -> None:
        """Record the time of a step, drafting included, and how many drafted tokens were accepted."""
        if self._pace is None:
            return
        depth = max(result.tree.depth for result in verified)
        self._pace.record_time(depth, seconds)
        for result in verified:
            self._counts.count(result)
            if depth:  # a request without drafted tokens gains nothing of what the others cost
                missed = result.missed or not result.tree.drafted
                self._pace.record_acceptance(len(result.path), missed=missed)

    def remove(self, entry: RequestState) -> None:
        """Remove the drafter of a finished request."""
        self._drafters.pop(entry.request.id, None)

    def _with_draft(self, item: Work, max_drafted: int) -> Work:
        request, cache = item.entry.request, self._cache
        depth = min(max_drafted, request.new_tokens - len(item.entry.new) - 1)
        if depth < 1:
            return item
        if request.id not in self._drafters:
            max_tokens = len(request.ids) + request.new_tokens
            self._drafters[request.id] = self._speculative.drafter(max_tokens)
        try:
            tree = self._drafters[request.id].draft(item.entry.tokens, depth, item.entry.sampler)
        except InputError:  # a draft's logits are not finite: the model's own may be
            return item
        tokens = item.first + 1 + len(tree.tokens)
        max_step_tokens = cache.layout.max_step_tokens if cache.layout.rings else tokens
        is_within_limits = tokens <= cache.max_tokens and len(tree.tokens) < max_step_tokens
        if not is_within_limits or cache.pages_needed(item.row, tokens) > cache.free_pages:
            return item
        cache.reserve(item.row, tokens)
        return replace(item, tree=tree)
