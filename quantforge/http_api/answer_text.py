"""The text of one answer over its tokens: whole characters, up to a stop string, with log-probabilities in step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantforge.http_api.asked_answers import AskedAnswers
from quantforge.runtime.serving.generation_requests import FinishReason, NewToken
from quantforge.runtime.stop_strings import StopMatcher
from quantforge.runtime.text_side import as_input_errors
from quantforge.runtime.token_stream import TextStream
from quantforge_calibration.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ToldToken:
    """A token with its log-probability.

    Attributes:
        token: its id.
        logprob: None for the first of a prompt, which follows nothing.
        top: the most likely tokens with theirs.
        offset: characters of the text before it.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """More of an answer.

    Attributes:
        text: that is sure now.
        scored: tokens that begin in it, where log-probabilities are told.
        reason: why the answer ended: ``stop`` or ``length``.
    """

    text: str = ""
    scored: tuple[ToldToken, ...] = ()
    reason: str | None = None


class AnswerText:
    """One answer while it comes.

    Args:
        tokenizer: of the model.
        prompt: token ids.
        asked: what it is to be like.
        ends: tokens that end it, which have no text.

    Attributes:
        tokens: number of them that were chosen.
        reason: why it ended, or None.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt: Sequence[int],
        asked: AskedAnswers,
        ends: frozenset[int],
    ) -> None:
        self._stream = TextStream(tokenizer, prompt)
        self._stop = StopMatcher(asked.stop, include=asked.include_stop)
        self._ends, self._scoring = ends, asked.logprobs is not None
        self._come = self._told = 0  # characters
        self._waiting: list[ToldToken] = []
        self.tokens = 0
        self.reason: str | None = None

    def begin(self, characters: int) -> None:
        """Note that the answer begins with so many characters, those of its prompt."""
        self._come = self._told = characters

    def add(self, one: NewToken) -> AnswerPiece:
        """Return what is sure with one more token.

        Raises:
            InputError: the tokenizer cannot decode.
        """
        self.tokens += 1
        if self._scoring:
            self._waiting.append(ToldToken(one.token, one.logprob, one.top, self._come))
        if one.token in self._ends:
            return AnswerPiece()
        with as_input_errors():
            sure = self._sure(self._stream.add(one.token))
        if self._stop.found is not None:
            self.reason = "stop"
        return AnswerPiece(sure, self._released(last=False), self.reason)

    def end(self, reason: FinishReason) -> AnswerPiece:
        """Return what is left when no token follows; errors as `add`."""
        with as_input_errors():
            sure = self._sure(self._stream.rest())
        sure += self._stop.rest()
        self._told = self._come if self._stop.found is None else self._told
        stopped = reason == FinishReason.STOP or self._stop.found is not None
        self.reason = "stop" if stopped else "length"
        return AnswerPiece(sure, self._released(last=self._stop.found is None), self.reason)

    def _sure(self, piece: str) -> str:
        self._come += len(piece)
        sure = self._stop.add(piece)
        self._told += len(sure)
        return sure

    def _released(self, *, last: bool) -> tuple[ToldToken, ...]:
        """Return tokens that begin in what was told; the last ones may have no text at all."""
        count = len(self._waiting)
        if not last:
            count = sum(one.offset < self._told for one in self._waiting)
        found, self._waiting = self._waiting[:count], self._waiting[count:]
        return tuple(found)
