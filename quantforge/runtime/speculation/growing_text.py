"""A text that grows by passes: the last token and guesses behind it are computed, and what is right of them stays."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantforge.runtime.cache import PagedCache
from quantforge.runtime.cache_rows import keep_path, spread
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.generate import CHUNK_TOKENS, Step, StopLimits, prefill
from quantforge.runtime.ragged import Span, Taps
from quantforge.runtime.sampling import Chosen, RowSampler, Sampling, choose_rows
from quantforge.runtime.speculation.draft_options import MOST_NODES
from quantforge.runtime.speculation.guess_trees import ROOT, GuessTree
from quantforge.runtime.speculation.guesses import Computed, WatchingGuesser


class GrowingText:
    """Text that grows: its cache holds all of its tokens but the last one.

    Args:
        decoder: the model.
        prompt: how it begins.
        limits: its cache has room for as many new tokens.
        sampling: how tokens are chosen.
        watching: who is told of all that is computed, if anybody is.

    Attributes:
        history: its tokens.
        sampler: what chooses them.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        limits: StopLimits,
        sampling: Sampling,
        watching: WatchingGuesser | None = None,
    ) -> None:
        self._decoder, self._watching = decoder, watching
        self._new_tokens = limits.new_tokens
        # A pass writes its guesses before it knows which are right. Places go beyond the last token, positions do not.
        most = len(prompt) + limits.new_tokens
        self._cache = decoder.cache(1, most + MOST_NODES, limits.cache)
        self._cache.reserve(0, most + MOST_NODES)
        self._cache.most_tokens = most
        self.history = list(prompt)
        self.sampler = RowSampler(sampling, prompt)
        self._passes: dict[int, tuple[PagedCache, Step]] = {}
        # Nothing that is chosen changes what is chosen next: the rows of a pass are chosen together.
        self._together = sampling.greedy and self.sampler.counts is None

    def first(self) -> Chosen:
        """Compute the prompt, and choose the first token."""
        ids = torch.tensor([self.history], device=self._decoder.device)
        if self._watching is None:
            logits = prefill(self._decoder, ids, self._cache, self._new_tokens)
            return self._choose(logits, GuessTree())[0][0]
        parts = [self._compute(part, None) for part in torch.split(ids[0], CHUNK_TOKENS)]
        hidden, *features = (torch.cat(rows) for rows in zip(*parts, strict=True))
        logits = self._decoder.logits(hidden[-1:])
        (one,), _ = self._choose(logits, GuessTree())
        following = tuple(self.history[1:])
        self._watching.watch(Computed(GuessTree(), logits, hidden, tuple(features), following))
        return one

    def advance(self, tree: GuessTree) -> tuple[list[Chosen], bool]:
        """Compute the last token and guesses behind it.

        Returns:
            The guesses that are right and one token more, and whether that one had guesses which are wrong.
        """
        before = len(self.history) - 1
        tokens = torch.tensor([self.history[-1], *tree.tokens], device=self._decoder.device)
        parts: list[Tensor] = []
        if tree.is_chain and self._watching is None:
            view, step = self._pass(len(tokens))
            view.lengths.copy_(torch.arange(before, before + len(tokens)))
            logits = step(tokens)
        else:
            parts = self._compute(tokens, None if tree.is_chain else tree.mask(root=True))
            logits = self._decoder.logits(parts[0])
        found, path = self._choose(logits, tree)
        rows = [0, *(node + 1 for node in path)]
        keep_path(self._cache, 0, before, rows)
        if self._watching is not None:
            hidden, *features = (part[rows] for part in parts)
            new = tuple(one.token for one in found)
            self._watching.watch(Computed(tree, logits, hidden, tuple(features), new))
        return found, bool(tree.children(path[-1] if path else ROOT))

    def _compute(self, tokens: Tensor, tree: Tensor | None) -> list[Tensor]:
        """Return the final states ``[tokens, hidden]`` of more tokens, and what of them is watched."""
        taps: Taps = None if self._watching is None else dict.fromkeys(self._watching.blocks)
        span = Span(0, len(tokens), None if tree is None else tree.to(tokens.device))
        hidden = self._decoder.hidden_of(tokens, [span], self._cache, taps)
        return [hidden, *(part for part in (taps or {}).values() if part is not None)]

    def _pass(self, width: int) -> tuple[PagedCache, Step]:
        """Return the step of so many tokens, and the view of the cache that it computes in; its pages are reserved."""
        if width not in self._passes:
            view = spread(self._cache, 0, width)
            self._passes[width] = view, Step(self._decoder, view)
        return self._passes[width]

    def _choose(self, logits: Tensor, tree: GuessTree) -> tuple[list[Chosen], list[int]]:
        """Choose tokens by rows ``[nodes + 1, vocabulary]`` until one is no guess; return them, and the path to it."""
        found: list[Chosen] = []
        path: list[int] = []
        rows = logits[: tree.guesses + 1]
        at_once = choose_rows([self.sampler] * len(rows), rows) if self._together else None
        node: int | None = ROOT
        while node is not None:
            one = self.sampler.choose(rows[node + 1]) if at_once is None else at_once[node + 1]
            self.history.append(one.token)
            found.append(one)
            node = tree.child(node, one.token)
            if node is not None:
                path.append(node)
        return found, path
