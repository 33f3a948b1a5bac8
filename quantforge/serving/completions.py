"""Completions while they are computed: prompts become requests to the engine, and its tokens become text.

Text is handed on as soon as it is sure: whole characters that cannot be the beginning of a stop string.
Log-probabilities of tokens keep in step with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from quantforge.runtime.sampling import Chosen
from quantforge.runtime.serving.generation_requests import (
    Finished,
    FinishReason,
    GenerationRequest,
    Happening,
    NewToken,
    PromptScored,
)
from quantforge.runtime.stop_strings import StopMatcher
from quantforge.runtime.text_side import TextSide
from quantforge.runtime.token_stream import TextStream
from quantforge.serving.api_error import ApiError, refusing
from quantforge.serving.request_bodies import Body, Prompt
from quantforge_calibration.conversations import Conversation


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability.

    Attributes:
        token: its id.
        logprob: in nats; None for the first token of a prompt, which follows nothing.
        top: the most likely tokens with theirs.
        offset: characters of the completion before it.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Further text of a completion.

    Attributes:
        text: of it.
        logprobs: of the tokens that begin in the text, where they are asked for.
        reason: why the completion has ended: ``stop`` or ``length``.
    """

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    reason: str | None = None


def join(pieces: Iterable[Piece]) -> Piece:
    """Return several pieces in a row as one."""
    found = [*pieces]
    text = "".join(piece.text for piece in found)
    logprobs = tuple(chain.from_iterable(piece.logprobs for piece in found))
    return Piece(text, logprobs, found[-1].reason if found else None)


class Completion:
    """One completion of a request.

    Args:
        index: its number among those of the request.
        request: what the engine computes.
        side: decodes its tokens.
        body: what is asked for.
        prompt: its prompt as it was sent.

    Attributes:
        tokens: how many were chosen.
    """

    def __init__(
        self, index: int, request: GenerationRequest, side: TextSide, body: Body, prompt: Prompt
    ) -> None:
        self.index, self.request, self.tokens = index, request, 0
        self._tokenizer, self._body, self._prompt = side.tokenizer, body, prompt
        self._ends = frozenset() if body.ignore_eos else side.stop
        self._stream = TextStream(side.tokenizer, request.ids)
        self._stop = StopMatcher(body.stops, include=body.include_stop_str_in_output)
        self._repeats = body.echo
        self._prompt_scores = [Chosen(request.ids[0])]
        self._decoded = self._sent = 0  # characters
        self._waiting: list[TokenLogprob] = []

    def add(self, event: Happening) -> Piece:
        """Return what an event of the engine adds; with a reason it is the last piece.

        Raises:
            ApiError: the completion failed, or the server is stopping.
            SourceError: the tokenizer cannot decode.
        """
        if isinstance(event, PromptScored):
            self._prompt_scores += event.tokens
            return Piece()
        if isinstance(event, Finished):
            _check(event)
        first = self._repeated() if self._repeats else Piece()
        return join([first, self._end(event) if isinstance(event, Finished) else self._next(event)])

    def _next(self, event: NewToken) -> Piece:
        if self._body.max_tokens == 0:  # the prompt alone is asked for
            return Piece()
        self.tokens += 1
        if self._body.top is not None:
            logprob = TokenLogprob(event.token, event.logprob, event.top, self._decoded)
            self._waiting.append(logprob)
        if event.token in self._ends:
            return Piece()
        text = self._sure(self._stream.add(event.token))
        return Piece(text, self._released(), None if self._stop.found is None else "stop")

    def _end(self, event: Finished) -> Piece:
        text = self._sure(self._stream.rest()) + self._stop.rest()
        if self._stop.found is not None:
            return Piece(text, self._released(), "stop")
        stopped = event.reason == FinishReason.STOP
        return Piece(text, tuple(self._waiting), "stop" if stopped else "length")

    def _sure(self, text: str) -> str:
        """Return what can be sent of the text so far."""
        self._decoded += len(text)
        sure = self._stop.add(text)
        self._sent += len(sure)
        return sure

    def _released(self) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of tokens that begin in what was sent."""
        count = sum(one.offset < self._sent for one in self._waiting)
        found, self._waiting = self._waiting[:count], self._waiting[count:]
        return tuple(found)

    def _repeated(self) -> Piece:
        """Return the prompt as the first piece."""
        self._repeats = False
        stream, text, logprobs = TextStream(self._tokenizer, ()), "", []
        for place, token in enumerate(self.request.ids):
            if self._body.top is not None:
                score = self._prompt_scores[place]
                logprobs.append(TokenLogprob(token, score.logprob, score.top, len(text)))
            text += stream.add(token)
        text = self._prompt if isinstance(self._prompt, str) else text + stream.rest()
        self._decoded = self._sent = len(text)
        return Piece(text, tuple(logprobs))


def _check(event: Finished) -> None:
    if event.reason == FinishReason.ERROR:
        raise ApiError(f"the completion failed: {event.error}", 500, code="engine_error")
    if event.reason == FinishReason.CANCELLED:
        raise ApiError("the server is stopping", 503, code="stopping")


def start(id: str, side: TextSide, body: Body, room: int) -> list[Completion]:  # noqa: A002 (the field's name)
    """Return the completions that a body asks for, before their first token: ``n`` of each prompt.

    Args:
        id: of the response, by which the engine knows its requests.
        side: encodes and decodes.
        body: what is asked for.
        room: most tokens of a prompt and its completion.

    Raises:
        ApiError: a prompt cannot be encoded or rendered, has no token, or leaves no room for the completion; a token
            has no row in the embedding.
    """
    sampling = replace(body.sampling, logprobs=body.top)
    with refusing("logit_bias"):
        side.tokenizer.check(sampling.logit_bias, "logit_bias")
    found: list[Completion] = []
    prompts = body.prompts
    for number, prompt in enumerate(prompts):
        ids = _encode(side, prompt, f"prompt[{number}]" if len(prompts) > 1 else "prompt")
        param = "messages" if isinstance(prompt, Conversation) else "prompt"
        if not ids:
            raise ApiError("the prompt has no tokens", param=param, code="empty_prompt")
        left = room - len(ids)
        wanted = left if body.max_tokens is None else body.max_tokens
        if left < max(1, wanted):
            raise ApiError(
                f"the prompt has {len(ids)} tokens, and {max(1, wanted)} more are asked for; "
                f"there is room for {room} in all: shorten the prompt, or ask for fewer",
                param="max_tokens" if left > 0 else param,
                code="context_length_exceeded",
            )
        ends = frozenset() if body.ignore_eos or not wanted else side.stop
        for place in range(body.n):
            index = len(found)
            request = GenerationRequest(
                f"{id}/{index}",
                tuple(ids),
                max(1, wanted),  # where none is asked for, one is computed and not sent
                ends,
                sampling.numbered(place),
                body.top if body.echo else None,
            )
            found.append(Completion(index, request, side, body, prompt))
    return found


def _encode(side: TextSide, prompt: Prompt, place: str) -> Sequence[int]:
    """Return the tokens of a prompt; errors as `start`."""
    tokenizer = side.tokenizer
    if isinstance(prompt, Conversation):
        if side.template is None:
            raise ApiError(
                "the model has no chat template, so it cannot be shown a conversation; send a text to /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        with refusing("messages", "chat_template", "/v1/completions takes a text as it is"):
            text = side.template.render(prompt, answer=True)
        with refusing("messages"):
            return tokenizer.encode_all(text, "messages, in the model's chat template")
    with refusing("prompt"):
        if not isinstance(prompt, str):
            tokenizer.check(prompt, place)
            return prompt
        ids = tokenizer.encode(prompt, place)
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return first + ids or ([] if tokenizer.eos_id is None else [tokenizer.eos_id])
