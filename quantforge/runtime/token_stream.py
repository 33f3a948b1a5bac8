"""Tokens of one answer as they are chosen, and their text as soon as it is whole.

A token of byte-level BPE may end in the middle of a character, and a decoder may drop a space at the beginning of what
it is given. So a piece of text is what some tokens add behind the ones before them, and it waits while its end is no
whole character (decoders write U+FFFD there).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import torch

from quantforge.runtime.decoding_engines import MeasuredEngine
from quantforge.runtime.sampling import Chosen, RowSampler, Sampling, choose_rows
from quantforge_calibration.tokenizer import TextTokenizer

BEFORE = 8  # tokens of the prompt that the first piece is decoded behind
PARTIAL = "\ufffd"


@torch.inference_mode()
def rows(
    engine: MeasuredEngine,
    ids: Sequence[int],
    new_tokens: int,
    samplers: Sequence[RowSampler],
    ended: Container[int] = (),
) -> Iterator[dict[int, Chosen]]:
    """Yield the tokens of several answers to one prompt, computed together, as soon as they are chosen.

    Args:
        engine: computes logits.
        ids: the prompt.
        new_tokens: at most so many for each answer.
        samplers: one for each answer.
        ended: numbers of answers for which nothing more is chosen; may grow between steps.

    Raises:
        InputError: logits that are no numbers.
    """
    prompts = torch.tensor([list(ids)] * len(samplers), device=engine.device)
    logits = engine.start(prompts, new_tokens).float()
    taken = [0] * len(samplers)
    for step in range(new_tokens):
        open_rows = [row for row in range(len(samplers)) if row not in ended]
        if not open_rows:
            return
        if step:
            logits = engine.step(torch.tensor(taken, device=engine.device)).float()
        those = logits if len(open_rows) == len(samplers) else logits[open_rows]
        chosen = choose_rows([samplers[row] for row in open_rows], those)
        for row, one in zip(open_rows, chosen, strict=True):
            taken[row] = one.token
        yield dict(zip(open_rows, chosen, strict=True))


def tokens(
    engine: MeasuredEngine, ids: Sequence[int], new_tokens: int, sampling: Sampling
) -> Iterator[int]:
    """Yield up to ``new_tokens`` tokens behind the prompt ``ids``, each as soon as it is chosen; errors as `rows`."""
    for chosen in rows(engine, ids, new_tokens, [RowSampler(sampling, ids)]):
        yield chosen[0].token


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
