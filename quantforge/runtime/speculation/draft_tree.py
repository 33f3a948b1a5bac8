"""Trees of guesses of a draft that reads along: behind each token, those that it finds likeliest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantforge.runtime.cache_rows import keep_path
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.ragged import Span
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.draft_options import MOST_NODES
from quantforge.runtime.speculation.guess_trees import ROOT, GuessTree
from quantforge.runtime.speculation.likely_trees import End, grow


class DraftTreeGuesser:
    """Guesser that computes a draft model place by place: all nodes of a depth in one pass, behind those before them.

    Args:
        decoder: the draft; its vocabulary is that of the model.
        room: most tokens of a text, guesses included.
        shape: of its trees, see `shape_of`.
    """

    def __init__(self, decoder: Decoder, room: int, shape: Sequence[int]) -> None:
        self._decoder, self._shape = decoder, shape
        most = min(room, decoder.positions)
        self._cache = decoder.cache(1, most + MOST_NODES)
        self._cache.reserve(0, most + MOST_NODES)
        self._cache.most_tokens = most  # places go beyond it, positions do not
        self._read: list[int] = []  # text in its cache; the last tree stands behind it
        self._tree, self._computed = GuessTree(), 0

    @torch.inference_mode()
    def guess(self, history: Sequence[int], most: int, sampler: RowSampler) -> GuessTree:
        """Return the likeliest tokens behind each other, as `Guesser.guess` says.

        The first behind each token is what ``sampler`` would choose of the draft's logits with the draw of that place.
        """
        depth = min(most, len(self._shape), self._cache.most_tokens - len(history))
        if depth < 1:
            return GuessTree()
        same = self._keep(history)
        logits = self._compute(list(history[same:]), None)[-1:]
        tree, self._tree, self._computed = GuessTree(), GuessTree(), 0
        ends: list[End] = [(ROOT, sampler)]
        for place, count in enumerate(self._shape[:depth]):
            if place:
                new = tree.tokens[self._computed :]
                logits = self._compute(new, tree.mask(root=False))
                self._computed = len(tree.tokens)
            ends = grow(tree, ends, logits, count)
        self._tree = tree
        return tree

    def _keep(self, history: Sequence[int]) -> int:
        """Keep what of the text and the last tree in the cache is the beginning of the text; return its tokens."""
        same, before = 0, len(self._read)
        for one, two in zip(self._read, history, strict=False):
            if one != two:
                break
            same += 1
        path: list[int] = []
        if same == before:
            for token in history[same:-1]:  # the last one is computed again for its logits
                node = self._tree.child(path[-1] if path else ROOT, token)
                if node is None or node >= self._computed:
                    break
                path.append(node)
        same = min(same, len(history) - 1)
        if path:
            keep_path(self._cache, 0, before, path)
        else:
            self._cache.advance(0, same - self._cache.length(0))
        self._read = list(history)
        return same + len(path)

    def _compute(self, tokens: list[int], tree: torch.Tensor | None) -> torch.Tensor:
        """Return logits ``[tokens, vocabulary]`` of more of the text (of its last token alone), or of a tree."""
        device = self._decoder.device
        span = Span(0, len(tokens), None if tree is None else tree.to(device))
        hidden = self._decoder.hidden_of(torch.tensor(tokens, device=device), [span], self._cache)
        return self._decoder.logits(hidden if tree is not None else hidden[-1:])
