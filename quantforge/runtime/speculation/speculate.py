"""One text with speculation: guess, check all guesses in one pass, keep those that are what the model chooses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantforge.runtime.cache import PagedCache
from quantforge.runtime.cache_rows import spread
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.generate import Step, StopLimits, check_prompts, prefill
from quantforge.runtime.sampling import Chosen, RowSampler, Sampling, choose_rows
from quantforge.runtime.speculation.guesses import Guesser, Speculated
from quantforge.runtime.speculation.pace import GuessPace, PassCosts

MOST_GUESSES = 8


@dataclass(slots=True)
class Speculation:
    """Speculation for one text.

    Attributes:
        guesser: guesses.
        most: guesses of a pass at most.
        fixed: always as many, instead of as many as pay.
        costs: of passes, for this text and others after it.
        counts: what came of it, renewed while tokens are yielded.
    """

    guesser: Guesser
    most: int = MOST_GUESSES
    fixed: bool = False
    costs: PassCosts = field(default_factory=PassCosts)
    counts: Speculated = field(default_factory=Speculated)


@torch.inference_mode()
def speculate(
    decoder: Decoder,
    prompt: Sequence[int],
    speculation: Speculation,
    limits: StopLimits | None = None,
    sampling: Sampling | None = None,
) -> Iterator[Chosen]:
    """Yield the tokens that `generate` gives for one prompt, each pass's as soon as they are known.

    Raises:
        InputError: as `generate`.
    """
    limits, sampling = limits or StopLimits(), sampling or Sampling()
    check_prompts(decoder, [prompt], limits.new_tokens)
    text = _GrowingText(decoder, prompt, limits, sampling)
    pace = GuessPace(speculation.most, fixed=speculation.fixed, costs=speculation.costs)
    left = limits.new_tokens
    one = text.first()
    yield one
    left -= 1
    while left and one.token not in limits.stop:
        began = time.perf_counter()
        most = min(pace.guesses(), left - 1)
        guesses = speculation.guesser.guess(text.history, most, text.sampler) if most else []
        found = text.advance(guesses)
        accepted, parted = len(found) - 1, len(found) <= len(guesses)
        pace.took(len(guesses), time.perf_counter() - began)
        pace.judged(accepted, parted=parted)
        _count(speculation.counts, len(guesses), accepted, parted=parted)
        for one in found:
            yield one
            left -= 1
            if one.token in limits.stop:
                break


class _GrowingText:
    """A text that grows: its cache holds all of its tokens but the last one."""

    def __init__(
        self, decoder: Decoder, prompt: Sequence[int], limits: StopLimits, sampling: Sampling
    ) -> None:
        self._decoder = decoder
        self._new_tokens = limits.new_tokens
        # A pass writes its guesses before it knows which are right; they never reach beyond the last token.
        self._cache = decoder.cache(1, len(prompt) + limits.new_tokens, limits.cache)
        self.history = list(prompt)
        self.sampler = RowSampler(sampling, prompt)
        self._passes: dict[int, tuple[PagedCache, Step]] = {}
        # Nothing that is chosen changes what is chosen next: the rows of a pass are chosen together.
        self._together = sampling.greedy and self.sampler.counts is None

    def first(self) -> Chosen:
        """Compute the prompt, and choose the first token."""
        ids = torch.tensor([self.history], device=self._decoder.device)
        logits = prefill(self._decoder, ids, self._cache, self._new_tokens)
        return self._choose(logits, [])[0]

    def advance(self, guesses: list[int]) -> list[Chosen]:
        """Compute the last token and the guesses behind it; return the guesses that are right, and one token more."""
        tokens = [self.history[-1], *guesses]
        before, width = len(self.history) - 1, len(tokens)
        view, step = self._pass(width)
        view.lengths.copy_(torch.arange(before, before + width))
        found = self._choose(step(torch.tensor(tokens, device=self._decoder.device)), guesses)
        self._cache.lengths[0] = before + len(
            found
        )  # what is there of wrong guesses is written over
        return found

    def _pass(self, width: int) -> tuple[PagedCache, Step]:
        """Return the step of so many tokens, and the view of the cache that it computes in; its pages are reserved."""
        if width not in self._passes:
            view = spread(self._cache, 0, width)
            self._passes[width] = view, Step(self._decoder, view)
        return self._passes[width]

    def _choose(self, logits: Tensor, guesses: list[int]) -> list[Chosen]:
        """Choose tokens by rows ``[guesses + 1, vocabulary]`` until one is not what was guessed."""
        found: list[Chosen] = []
        rows = [logits] if self._together else [*logits[:, None]]
        chosen = (one for part in rows for one in choose_rows([self.sampler] * len(part), part))
        for place, one in enumerate(chosen):
            self.history.append(one.token)
            found.append(one)
            if place < len(guesses) and one.token != guesses[place]:
                break
        return found


def _count(counts: Speculated, guessed: int, accepted: int, *, parted: bool) -> None:
    counts.passes += 1
    counts.tokens += accepted + 1
    if guessed:
        counts.checked += 1
        counts.guessed += guessed
        counts.accepted += accepted
        counts.came += accepted + 1
        counts.parted += parted
