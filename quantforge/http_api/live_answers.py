"""Answers of one request over HTTP while they come: requests to the engine, and pieces of text of what it tells."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quantforge.http_api.answer_text import AnswerPiece, AnswerText, ToldToken
from quantforge.http_api.api_error import ApiError
from quantforge.http_api.asked_answers import AskedAnswers
from quantforge.runtime.sampling import Chosen, Sampling
from quantforge.runtime.serving.generation_requests import (
    Finished,
    FinishReason,
    GenerationRequest,
    Happening,
    NewToken,
)
from quantforge.runtime.text_side import TextSide, as_input_errors
from quantforge.runtime.token_stream import TextStream

TEMPERATURE = 1.0  # where a body has none, as OpenAI's


@dataclass(slots=True)
class ComingAnswer:
    """One answer: its number, its text, and what the model thinks of its prompt."""

    index: int
    request: GenerationRequest
    text: AnswerText
    echoed: bool = False
    prompt: list[Chosen] = field(default_factory=list)


class LiveAnswers:
    """Answers that a request asks for.

    Args:
        id: of the request, by which the engine knows its answers.
        side: encodes and decodes.
        asked: what is wanted.
        prompts: token ids of each prompt.
        room: most tokens of a prompt and its answer.

    Attributes:
        requests: to the engine.
        prompt_tokens: of all prompts.

    Raises:
        ApiError: a prompt, or a prompt and its answer, has more tokens than there is room for.
    """

    def __init__(
        self,
        id: str,  # noqa: A002 (the name of the field)
        side: TextSide,
        asked: AskedAnswers,
        prompts: Sequence[tuple[int, ...]],
        room: int,
    ) -> None:
        self._side, self._asked = side, asked
        ends: frozenset[int] = frozenset() if asked.ignore_eos else side.stop
        rule = _rule(asked)
        self._coming: dict[str, ComingAnswer] = {}
        for place, ids in enumerate(prompts):
            tokens = _tokens(asked, len(ids), room)
            for number in range(asked.n):
                index = place * asked.n + number
                request = GenerationRequest(
                    f"{id}/{index}",
                    ids,
                    max(1, tokens),  # none at all: one is computed and not told
                    ends if tokens else frozenset(),
                    rule.numbered(number),
                    asked.logprobs if asked.echo else None,
                )
                text = AnswerText(side.tokenizer, ids, asked, ends)
                self._coming[request.id] = ComingAnswer(index, request, text)
        self.requests = [one.request for one in self._coming.values()]
        self._texts = [one.text for one in self._coming.values()]
        self.prompt_tokens = sum(map(len, prompts))

    @property
    def done(self) -> bool:
        """Return whether all answers have ended."""
        return not self._coming

    @property
    def tokens(self) -> int:
        """Return the number of tokens that were chosen."""
        return sum(text.tokens for text in self._texts)

    def take(self, happened: Happening) -> list[tuple[int, AnswerPiece]]:
        """Return what comes of it: numbers of answers with more of each. An answer with a reason has ended.

        Raises:
            ApiError: the engine, or a person, has ended it before its time.
            InputError: the tokenizer cannot decode.
        """
        one = self._coming.get(happened.id)
        if one is None:  # had ended by a stop string
            return []
        if isinstance(happened, Finished):
            return self._end(one, happened)
        if not isinstance(happened, NewToken):
            one.prompt += happened.tokens
            return []
        found = self._echo(one)
        if self._asked.max_tokens != 0:
            found.append(one.text.add(happened))
        if one.text.reason is not None:
            del self._coming[happened.id]
        return _told(one.index, found)

    def _end(self, one: ComingAnswer, finished: Finished) -> list[tuple[int, AnswerPiece]]:
        if finished.reason == FinishReason.ERROR:
            raise ApiError(
                f"the answer cannot be computed: {finished.error}", 500, code="engine_error"
            )
        if finished.reason == FinishReason.CANCELLED:
            raise ApiError("the server is stopping", 503, code="stopping")
        found = [*self._echo(one), one.text.end(finished.reason)]
        del self._coming[one.request.id]
        return _told(one.index, found)

    def _echo(self, one: ComingAnswer) -> list[AnswerPiece]:
        """Return the prompt, once, where it is asked for."""
        if not self._asked.echo or one.echoed:
            return []
        one.echoed = True
        ids, text = one.request.ids, ""
        scored: list[ToldToken] = []
        given = self._asked.prompts[one.index // self._asked.n]
        stream = TextStream(self._side.tokenizer, ())
        scores = [Chosen(ids[0]), *one.prompt] if self._asked.logprobs is not None else []
        with as_input_errors():
            for number, token in enumerate(ids):
                if scores:
                    score = scores[number]
                    scored.append(ToldToken(token, score.logprob, score.top, len(text)))
                text += stream.add(token)
            text += stream.rest()
        if isinstance(given, str):
            text = given
        one.text.begin(len(text))
        return [AnswerPiece(text, tuple(scored))]


def _told(index: int, pieces: Sequence[AnswerPiece]) -> list[tuple[int, AnswerPiece]]:
    return [(index, piece) for piece in pieces if piece.text or piece.scored or piece.reason]


def _rule(asked: AskedAnswers) -> Sampling:
    """Return how tokens are chosen; without a seed nobody knows the next one."""
    given: dict[str, Any] = {
        "temperature": TEMPERATURE,
        "seed": secrets.randbits(62),
        **asked.sampling,
    }
    return Sampling(**given, logprobs=asked.logprobs)


def _tokens(asked: AskedAnswers, prompt: int, room: int) -> int:
    """Return the most tokens of an answer.

    Raises:
        ApiError: there is no room for them.
    """
    left = room - prompt
    tokens = left if asked.max_tokens is None else asked.max_tokens
    if left < max(1, tokens):
        raise ApiError(
            f"the prompt has {prompt} tokens, and {max(1, tokens)} more are asked for; "
            f"there is room for {room} in all: shorten the prompt, or ask for fewer",
            param="max_tokens"
            if left > 0
            else "prompt"
            if isinstance(asked.prompts[0], str | tuple)
            else "messages",
            code="context_length_exceeded",
        )
    return tokens
