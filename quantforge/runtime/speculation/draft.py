"""Guesses of a smaller model, or of the same model in fewer bits, that reads along."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantforge.errors import InputError
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.generate import Step
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.guess_trees import GuessTree, chain


class DraftGuesser:
    """Guesser that computes a draft model, with a cache of its own.

    Args:
        decoder: the draft; its vocabulary is that of the model.
        room: most tokens of a text, guesses included.
    """

    def __init__(self, decoder: Decoder, room: int) -> None:
        self._decoder = decoder
        self._cache = decoder.cache(1, min(room, decoder.positions))
        self._cache.reserve(0, self._cache.most_tokens)
        self._step = Step(decoder, self._cache)
        self._read: list[int] = []  # tokens in its cache

    @torch.inference_mode()
    def guess(self, history: Sequence[int], most: int, sampler: RowSampler) -> GuessTree:
        """Return its own continuation, as `Guesser.guess` says; where it draws, with the draws of ``sampler``."""
        most = min(most, self._cache.most_tokens - len(history))
        if most < 1:
            return GuessTree()
        same = 0
        for one, two in zip(self._read, history, strict=False):
            if one != two:
                break
            same += 1
        same = min(same, len(history) - 1)  # the last token is computed again for its logits
        self._cache.advance(0, same - self._cache.length(0))
        self._read = list(history)
        draws = sampler.fork()
        logits = self._after(history[same:])
        found: list[int] = []
        while True:
            found.append(draws.choose(logits[0]).token)
            if len(found) == most:
                return chain(found)
            self._read.append(found[-1])
            logits = self._step(torch.tensor(found[-1:], device=self._decoder.device))

    def _after(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return logits ``[1, vocabulary]`` behind more tokens of the text."""
        ids = torch.tensor([list(tokens)], device=self._decoder.device)
        if len(tokens) == 1:
            return self._step(ids[0])
        hidden = self._decoder.hidden(ids, self._cache)
        self._cache.count(len(tokens))
        return self._decoder.logits(hidden[:, -1])


def check_draft(model_vocabulary: int, draft_vocabulary: int, name: str) -> None:
    """Refuse a draft of another vocabulary.

    Raises:
        InputError: naming both sizes.
    """
    if model_vocabulary != draft_vocabulary:
        raise InputError(
            f"{name} knows {draft_vocabulary} tokens, the model {model_vocabulary}",
            "a draft has the tokenizer of its model: take a smaller one of the same family, or int2",
        )
