"""Speculation of an engine: guesses beside the tokens of a step that only decodes, as many as pay for all requests.

Each request has a guesser of its own, made when guesses are first asked for. How many tokens are guessed is decided for
a step, from what steps of as many requests have cost and how often guesses of any of them were right: so guesses stop
by themselves where many requests fill the step already, and come back when few are left. Guesses never take pages from
a request, nor places of a step from a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantforge.errors import InputError, UsageError
from quantforge.runtime.cache import PagedCache
from quantforge.runtime.serving.choosing import Followed
from quantforge.runtime.serving.entries import ServedEntry, Work
from quantforge.runtime.speculation.draft_choice import GuessedDecoder
from quantforge.runtime.speculation.draft_options import FOR_ONE_TEXT
from quantforge.runtime.speculation.guesses import Guesser, Speculated, WatchingGuesser
from quantforge.runtime.speculation.pace import GuessPace


@dataclass(slots=True)
class _Asked:
    """Guesses of a step: the pace of its number of requests, and how many tokens in a row."""

    pace: GuessPace
    depth: int = 0


class StepGuesses:
    """Guesses for the steps of an engine.

    Args:
        drafting: who guesses.
        cache: of the engine.
        budget: most tokens of a step.
        counts: to count in.

    Raises:
        UsageError: guessers that need what the model computes of one text.
    """

    def __init__(
        self, drafting: GuessedDecoder, cache: PagedCache, budget: int, counts: Speculated
    ) -> None:
        if isinstance(drafting.guesser(1), WatchingGuesser):
            raise UsageError(*FOR_ONE_TEXT)
        self._drafting, self._cache, self._budget, self._counts = drafting, cache, budget, counts
        self._paces: dict[int, GuessPace] = {}
        self._guessers: dict[str, Guesser] = {}
        self._asked: _Asked | None = None

    def proposed(self, work: Sequence[Work]) -> list[Work]:
        """Return the work of a step with guesses; pages for them are reserved."""
        self._asked = None
        if not work or not all(part.chooses and part.tokens == 1 for part in work):
            return list(work)
        pace = self._pace(len(work))
        most = min(pace.guesses(), self._budget // len(work) - 1)
        found = [self._with_guesses(part, most) for part in work] if most > 0 else list(work)
        self._asked = _Asked(pace, max((part.tree.depth for part in found), default=0))
        return found

    def took(self, seconds: float, came: Sequence[Followed]) -> None:
        """Note what a step took, guessing included, and what came of it."""
        asked = self._asked
        if asked is None:
            return
        asked.pace.took(asked.depth, seconds)
        for one in came:
            tree, right = one.part.tree, len(one.path)
            self._counts.count(tree, right, parted=one.parted)
            if asked.depth:  # a request without guesses gains nothing of what the others cost
                asked.pace.judged(right, parted=one.parted or not tree.guesses)

    def forget(self, entry: ServedEntry) -> None:
        """Let go of the guesser of a request that has ended."""
        self._guessers.pop(entry.request.id, None)

    def _pace(self, rows: int) -> GuessPace:
        size = 1 << (rows - 1).bit_length()
        if size not in self._paces:
            self._paces[size] = GuessPace(self._drafting.most, fixed=self._drafting.fixed)
        return self._paces[size]

    def _with_guesses(self, part: Work, most: int) -> Work:
        request, cache = part.entry.request, self._cache
        depth = min(most, request.new_tokens - len(part.entry.new) - 1)
        if depth < 1:
            return part
        if request.id not in self._guessers:
            room = len(request.ids) + request.new_tokens
            self._guessers[request.id] = self._drafting.guesser(room)
        guesser = self._guessers[request.id]
        try:
            tree = guesser.guess(part.entry.tokens, depth, part.entry.sampler)
        except InputError:  # logits of a draft that are no numbers: the model's own may be
            return part
        tokens = part.first + 1 + len(tree.tokens)
        ahead = cache.layout.ahead if cache.layout.rings else tokens
        fits = tokens <= cache.most_tokens and len(tree.tokens) < ahead
        unused = cache.pool.free - cache.pool.idle  # the others are kept for later requests
        if not fits or cache.wanted(part.row, tokens) > unused:
            return part
        cache.reserve(part.row, tokens)
        return replace(part, tree=tree)
