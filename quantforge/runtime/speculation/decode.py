"""Speculative decoding of one text: draft, compute all drafted tokens in one pass, keep what the model chooses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.runtime.cache import CacheView, keep_path
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding_steps import CHUNK_TOKENS, Step, prefill
from quantforge.runtime.ragged import Span
from quantforge.runtime.sampling import Chosen, RowSampler, Sampling
from quantforge.runtime.speculation.drafter import Computed, Drafter
from quantforge.runtime.speculation.options import MOST_NODES
from quantforge.runtime.speculation.pace import Pace
from quantforge.runtime.speculation.tree import DraftTree
from quantforge.runtime.speculation.verify import SpeculationCounts, Verified, verify


@dataclass(slots=True)
class SpeculativeDecoder:
    """A model, and who drafts for its texts.

    Attributes:
        decoder: the model.
        drafter: makes one for a text of at most so many tokens.
        most: drafted tokens in a row, at most.
        fixed: always draft as many, instead of as many as pay.
    """

    decoder: Decoder
    drafter: Callable[[int], Drafter]
    most: int
    fixed: bool = False
    _paces: dict[int, Pace] = field(default_factory=dict)

    def pace(self, texts: int) -> Pace:
        """Return the pace of passes over about so many texts."""
        size = 1 << (texts - 1).bit_length()
        return self._paces.setdefault(size, Pace(self.most, fixed=self.fixed))


class SpeculativeText:
    """Text of a model that grows by passes; iterate over its new tokens, which are those of the plain loop.

    Args:
        speculative: the model and who drafts.
        prompt: token ids; at least one.
        new_tokens: that follow; at least one.
        sampling: how they are chosen.
        cache: kind of the cache, see `quantforge.architectures.cache_kinds`.

    Attributes:
        counts: what came of drafted tokens.

    Raises:
        InputError: logits of the model or of a draft are not finite; while it is iterated over.
    """

    def __init__(
        self,
        speculative: SpeculativeDecoder,
        prompt: Sequence[int],
        new_tokens: int,
        sampling: Sampling | None = None,
        cache: str = "",
    ) -> None:
        self._decoder, self._new_tokens = speculative.decoder, new_tokens
        # A pass writes all drafted tokens: places go beyond the last token, positions do not.
        most = len(prompt) + new_tokens
        self._cache = self._decoder.cache(1, most + MOST_NODES, cache)
        self._cache.reserve(0, most + MOST_NODES)
        self._cache.most_tokens = most
        self._history = list(prompt)  # all of it but the last token is in the cache
        self._sampler = RowSampler(sampling or Sampling(), prompt)
        self._drafter, self._pace = speculative.drafter(most), speculative.pace(1)
        self._steps: dict[int, tuple[CacheView, Step]] = {}
        self.counts = SpeculationCounts()

    @torch.inference_mode()
    def __iter__(self) -> Iterator[Chosen]:
        left, chosen = self._new_tokens, self._advance(DraftTree())[1]
        yield from chosen
        while left := left - len(chosen):
            began = time.perf_counter()
            most = min(self._pace.tokens(), left - 1)
            tree = self._draft(most) if most else DraftTree()
            verified, chosen = self._advance(tree)
            self._pace.took(most if tree.probes else tree.depth, time.perf_counter() - began)
            useless = tree.probes > 0 and not tree.drafted
            self._pace.judged(len(verified.path), missed=verified.missed or useless)
            self.counts.count(verified)
            yield from chosen

    def _draft(self, most: int) -> DraftTree:
        try:
            return self._drafter.draft(self._history, most, self._sampler)
        except InputError as error:  # in the words of a model, which is not to blame
            raise InputError(
                f"the draft: {error.message}",
                "it is damaged: take another one, or leave --draft out",
            ) from error

    def _advance(self, tree: DraftTree) -> tuple[Verified, list[Chosen]]:
        """Compute what of the text is not in the cache, and a tree after it; append the tokens that follow."""
        start = self._cache.length(0)
        tokens = torch.tensor([*self._history[start:], *tree.tokens], device=self._decoder.device)
        new = len(self._history) - start
        states: list[Tensor] = []
        if self._drafter.taps is not None or not tree.is_chain:
            states = self._states(tokens, None if tree.is_chain else tree.mask(root=True))
            logits = self._decoder.logits(states[0][new - 1 :])
        elif start:
            logits = self._step(tokens, start)
        else:
            logits = prefill(self._decoder, tokens[None], self._cache, self._new_tokens)
        (verified,) = verify(logits, [self._sampler], [tree], [frozenset()])
        for one in verified.chosen:
            if isinstance(one, InputError):
                raise one
            self._history.append(one.token)
        keep_path(self._cache, 0, start + new - 1, [0, *(node + 1 for node in verified.path)])
        if self._drafter.taps is not None:
            rows = [*range(new), *(new + node for node in verified.path)]
            hidden, *features = (part[rows] for part in states)
            following = tuple(self._history[start + 1 :])
            self._drafter.observe(Computed(tree, logits, hidden, tuple(features), following))
        return verified, cast("list[Chosen]", verified.chosen)

    def _step(self, tokens: Tensor, start: int) -> Tensor:
        """Return logits of tokens in a row, computed by recorded programs as if each belonged to another sequence.

        All of them are written before any is attended to, and each sees those before it.
        """
        width = len(tokens)
        if width not in self._steps:
            view = CacheView(self._cache, width)
            view.show([0])
            self._steps[width] = view, Step(self._decoder, view)
        view, step = self._steps[width]
        view.lengths.copy_(torch.arange(start, start + width))
        return step(tokens)

    def _states(self, tokens: Tensor, mask: Tensor | None) -> list[Tensor]:
        """Return final states ``[tokens, hidden]`` of tokens, and the inputs of blocks that the drafter reads."""
        parts = []
        for ids in torch.split(tokens, CHUNK_TOKENS):
            taps: dict[int, Tensor | None] = dict.fromkeys(self._drafter.taps or ())
            span = Span(0, len(ids), None if mask is None else mask.to(ids.device))
            hidden = self._decoder.hidden_of(ids, [span], self._cache, taps)
            parts.append([hidden, *(part for part in taps.values() if part is not None)])
        return [torch.cat(rows) for rows in zip(*parts, strict=True)]
