"""Speculation of an engine: drafted tokens after those of a step that only decodes, as many as pay for all requests.

Each request has a drafter of its own, made when tokens are first drafted for it. How many are drafted is decided for a
step, from what steps of as many requests have cost and how often drafted tokens of any of them were right: so drafting
stops by itself where many requests fill the step already, and comes back when few are left. Drafted tokens never take
pages from a request, nor places of a step from a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantforge.errors import InputError, UsageError
from quantforge.runtime.cache import PagedCache
from quantforge.runtime.serving.scheduler import ServedEntry, Work
from quantforge.runtime.speculation.decode import SpeculativeDecoder
from quantforge.runtime.speculation.drafter import Drafter
from quantforge.runtime.speculation.options import FOR_ONE_TEXT
from quantforge.runtime.speculation.pace import Pace
from quantforge.runtime.speculation.verify import SpeculationCounts, Verified


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
