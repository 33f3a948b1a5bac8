"""Tokens of one answer as they are chosen, and their text as soon as it is whole.

A token of byte-level BPE may end in the middle of a character, and a decoder may drop a space at the beginning of what
it is given. So a piece of text is what some tokens add behind the ones before them, and it waits while its end is no
whole character (decoders write U+FFFD there).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from quantforge.runtime.decoding_engines import MeasuredEngine
from quantforge.runtime.sampling import Sampler, Sampling
from quantforge_calibration.tokenizer import TextTokenizer

BEFORE = 8  # tokens of the prompt that the first piece is decoded behind
PARTIAL = "\ufffd"


@torch.inference_mode()
def tokens(
    engine: MeasuredEngine, ids: Sequence[int], new_tokens: int, sampling: Sampling
) -> Iterator[int]:
    """Yield up to ``new_tokens`` tokens behind the prompt ``ids``, each as soon as it is chosen.

    Raises:
        InputError: logits that are no numbers.
    """
    sampler = Sampler(sampling)
    logits = engine.start(torch.tensor([list(ids)], device=engine.device), new_tokens).float()
    seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    seen[0, list(ids)] = True
    chosen = sampler.choose(logits, seen)
    yield int(chosen)
    for _ in range(new_tokens - 1):
        seen[0, chosen] = True
        chosen = sampler.choose(engine.step(chosen).float(), seen)
        yield int(chosen)


class TextStream:
    """Text of tokens that come one by one behind a prompt."""

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-BEFORE:])
        self._first, self._told = 0, len(self._ids)

    def add(self, token: int) -> str:
        """Return the text that is whole now, often one word and sometimes none.

        Raises:
            SourceError: the tokenizer cannot decode.
        """
        self._ids.append(token)
        return self._piece(whole=True)

    def rest(self) -> str:
        """Return the text that is left when no token follows; errors as `add`."""
        return self._piece(whole=False)

    def _piece(self, *, whole: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._first : self._told])
        now = self._tokenizer.decode(self._ids[self._first :])
        if len(now) <= len(before) or (whole and now.endswith(PARTIAL)):
            return ""
        self._first, self._told = self._told, len(self._ids)
        return now[len(before) :]
