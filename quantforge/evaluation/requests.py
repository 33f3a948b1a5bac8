"""Requests of tasks to a model, through our runtime: how likely is this continuation, this text; go on from here.

Tokens are counted as other evaluations count them, so that figures compare. A continuation is what
the tokens of ``context + continuation`` have beyond those of the context. Spaces at the end of a
context belong to what follows. An empty context is the token that begins a text (BOS, or else the
end-of-text token). Every text begins with BOS where the tokenizer puts one. What is too long loses its beginning.

Logits of a continuation are computed from final hidden states, for its own tokens only: the head
never sees the context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.evaluation.head import Head, check_head, summed
from quantforge.evaluation.perplexity import forward_tokens
from quantforge.model.inner import inner
from quantforge.runtime.decoding_engines import MeasuredEngine, engine_of
from quantforge.runtime.sampling import Sampling
from quantforge.runtime.stored_entries import LayerScales
from quantforge.runtime.token_stream import tokens
from quantforge_calibration.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEW_TOKENS = 256
CHECKED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Continuation:
    """Rules for the continuation of a text.

    Attributes:
        stop: what ends it; the result ends before.
        new_tokens: at most so many.
        sampling: how tokens are chosen.
    """

    stop: tuple[str, ...] = ()
    new_tokens: int = NEW_TOKENS
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens ``ids``, of which the last ``count`` are scored."""

    ids: tuple[int, ...]
    count: int


class Answers:
    """A model that answers.

    Args:
        model: loaded, in the type in which it is to be measured.
        tokenizer: its tokenizer.
        positions: tokens that it can see.
        scales: of its KV cache, where they were measured.

    Raises:
        InputError: the tokenizer has no token to begin with.
        RefusedError: the model's head is not understood (see `check_head`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: TextTokenizer,
        positions: int,
        scales: LayerScales | None = None,
    ) -> None:
        begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if begin is None:
            raise InputError(
                "the tokenizer has neither a token that begins a text nor one that ends it",
                "set bos_token or eos_token in tokenizer_config.json",
            )
        self._begin: int = begin
        self._model = model
        self._tokenizer = tokenizer
        self._positions = positions
        self._scales = scales
        self._head = Head(model)
        self._engine: MeasuredEngine | None = None
        ids = torch.full((1, min(CHECKED_TOKENS, positions)), begin, device=model.device)
        with torch.inference_mode():
            check_head(model, self._head, ids)

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return ``(log-likelihood in nats, is it the greedy one)`` of each ``(context, continuation)``."""
        return self._score([self.split(*pair) for pair in pairs])

    def texts(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihood of each whole text in nats; long ones are cut by `disjoint`."""
        found = []
        for text in texts:
            parts = disjoint(self._tokenizer.encode(text), self._begin, self._positions)
            found.append(sum(value for value, _ in self._score(parts)))
        return found

    def go_on(self, context: str, wanted: Continuation) -> str:
        """Return the continuation of a text.

        Raises:
            InputError: more new tokens than the model has positions, or logits that are no numbers.
        """
        room = self._positions - wanted.new_tokens
        if room < 1:
            raise InputError(
                f"{wanted.new_tokens} new tokens, the model has {self._positions} positions",
                "ask for fewer (max_gen_toks)",
            )
        ids = (self._prefix() + self._tokenizer.encode(context))[-room:] or [self._begin]
        if self._engine is None:
            self._engine = engine_of(self._model, scales=self._scales)[0]
        found: list[int] = []
        for token in tokens(self._engine, ids, wanted.new_tokens, wanted.sampling):
            if token == self._tokenizer.eos_id:
                break
            found.append(token)
            text = self._tokenizer.decode(found)
            if any(stop in text for stop in wanted.stop):
                break
        return ended(self._tokenizer.decode(found), wanted.stop)

    def split(self, context: str, continuation: str) -> Scored:
        """Return the tokens of a context and its continuation; those of the continuation are scored, at least one."""
        stripped = context.rstrip()
        context, continuation = stripped, context[len(stripped) :] + continuation
        if not context:
            ids = self._tokenizer.encode(continuation)
            return self._shortened([self._begin, *ids], len(ids))
        before = self._prefix() + self._tokenizer.encode(context)
        whole = self._prefix() + self._tokenizer.encode(context + continuation)
        return self._shortened(whole, max(len(whole) - len(before), 1))

    def _prefix(self) -> list[int]:
        bos = self._tokenizer.bos_id
        return [] if bos is None else [bos]

    def _shortened(self, ids: list[int], count: int) -> Scored:
        """Return the last tokens, as many as the model sees, one of them to begin with."""
        kept = ids[-(self._positions + 1) :]
        return Scored(tuple(kept), min(count, len(kept) - 1))

    def _score(self, items: Sequence[Scored]) -> list[tuple[float, bool]]:
        found = [(0.0, True)] * len(items)  # what has no token to score is certain
        most = forward_tokens(self._model.device)
        asked = [place for place, item in enumerate(items) if item.count]
        for batch in batches([len(items[place].ids) - 1 for place in asked], most):
            places = [asked[index] for index in batch]
            for place, values in zip(
                places, self._batch([items[place] for place in places]), strict=True
            ):
                found[place] = values
        return found

    @torch.inference_mode()
    def _batch(self, items: Sequence[Scored]) -> Iterator[tuple[float, bool]]:
        """Score some texts together; shorter ones are filled up behind, where nobody looks."""
        longest = max(len(item.ids) for item in items) - 1
        ids = torch.full((len(items), longest), self._begin)
        for row, item in zip(ids, items, strict=True):
            row[: len(item.ids) - 1] = torch.tensor(item.ids[:-1])
        output = inner(self._model)(ids.to(self._model.device), use_cache=False)
        for hidden, item in zip(output.last_hidden_state, items, strict=True):
            last = len(item.ids) - 1
            targets = torch.tensor(item.ids[-item.count :], device=hidden.device)
            yield self._likelihood(hidden[last - item.count : last], targets)

    def _likelihood(self, hidden: Tensor, targets: Tensor) -> tuple[float, bool]:
        total, greedy = 0.0, True
        for chunk in self._head.chunks(len(targets)):
            sums = summed(self._head, hidden[chunk], targets[chunk], places=True)
            nll = sums.nll
            if not bool(nll.isfinite().all()):
                raise InputError(
                    "a log-likelihood is no number",
                    "the weights are damaged, or activations overflow this type",
                )
            total -= nll.sum().item()
            assert sums.best is not None
            greedy &= bool((sums.best == targets[chunk]).all())
        return total, greedy


def disjoint(ids: Sequence[int], begin: int, positions: int) -> list[Scored]:
    """Cut a text so that each token is scored once, in windows of ``positions`` tokens; the first follows ``begin``.

    Every other window also has the token before it; the last one, which scores fewer, has as many
    tokens before it as the model has positions left for.
    """
    found = []
    for first in range(0, len(ids), positions):
        last = min(first + positions, len(ids))
        count = last - first
        window = (
            (begin, *ids[:last]) if first == 0 else tuple(ids[max(0, last - positions - 1) : last])
        )
        found.append(Scored(tuple(window), count))
    return found


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield indices of texts that are computed together: of similar lengths, at most ``most`` tokens with padding.

    A text that is longer by itself is computed alone.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    batch: list[int] = []
    for place in order:
        if batch and (len(batch) + 1) * lengths[batch[0]] > most:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def ended(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first of some strings."""
    ends = [text.find(mark) for mark in stop if mark and mark in text]
    return text[: min(ends)] if ends else text
