r"""Completions while they are computed: prompts become requests to the engine, its tokens text, and text documents.

Text is handed on as soon as it is sure: whole characters that cannot be the beginning of a stop string.
Log-probabilities of tokens keep in step with it.

Documents are those of OpenAI's API: whole ones, and the chunks of a stream. A token that is a part of a character has
no text of its own. Its text is then as there: ``bytes:\xe4\xbd``.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

from quantforge.formats.gguf.tokenizer import BYTE_CHARACTERS
from quantforge.runtime.batching.generation_requests import (
    EngineEvent,
    Finished,
    FinishReason,
    GenerationRequest,
    NewToken,
    PromptScored,
)
from quantforge.runtime.sampling import ChosenToken
from quantforge.runtime.text_processing import TextProcessor
from quantforge.runtime.text_stream import INCOMPLETE, TextStream
from quantforge.serving.api_error import ApiError, refusing
from quantforge.serving.request_bodies import Body, Prompt
from quantforge_calibration.conversations import Conversation
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.tokenizer import TextTokenizer


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
        self,
        index: int,
        request: GenerationRequest,
        side: TextProcessor,
        body: Body,
        prompt: Prompt,
    ) -> None:
        self.index, self.request, self.tokens = index, request, 0
        self._tokenizer, self._body, self._prompt = side.tokenizer, body, prompt
        self._ends = frozenset() if body.ignore_eos else side.stop
        self._stream = TextStream(
            side.tokenizer, request.ids, body.stops, include_stop=body.include_stop_str_in_output
        )
        self._repeats = body.echo
        self._prompt_scores = [ChosenToken(request.ids[0])]
        self._echoed = 0  # characters of the prompt that were sent
        self._waiting: list[TokenLogprob] = []

    def add(self, event: EngineEvent) -> Piece:
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
            logprob = TokenLogprob(
                event.token, event.logprob, event.top, self._echoed + self._stream.decoded
            )
            self._waiting.append(logprob)
        if event.token in self._ends:
            return Piece()
        text = self._stream.add(event.token)
        return Piece(text, self._released(), "stop" if self._stream.stopped_by else None)

    def _end(self, event: Finished) -> Piece:
        text = self._stream.flush()
        if self._stream.stopped_by is not None:
            return Piece(text, self._released(), "stop")
        stopped = event.reason == FinishReason.STOP
        return Piece(text, tuple(self._waiting), "stop" if stopped else "length")

    def _released(self) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of tokens that begin in what was sent."""
        count = sum(one.offset < self._echoed + self._stream.emitted for one in self._waiting)
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
        text = self._prompt if isinstance(self._prompt, str) else text + stream.flush()
        self._echoed = len(text)
        return Piece(text, tuple(logprobs))


def _check(event: Finished) -> None:
    if event.reason == FinishReason.ERROR:
        raise ApiError(f"the completion failed: {event.error}", 500, code="engine_error")
    if event.reason == FinishReason.CANCELLED:
        raise ApiError("the server is stopping", 503, code="stopping")


def start(id: str, side: TextProcessor, body: Body, room: int) -> list[Completion]:  # noqa: A002 (the field's name)
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
                sampling.for_choice(place),
                body.top if body.echo else None,
            )
            found.append(Completion(index, request, side, body, prompt))
    return found


def _encode(side: TextProcessor, prompt: Prompt, place: str) -> Sequence[int]:
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
            text = side.template.render(prompt, add_generation_prompt=True)
        with refusing("messages"):
            return tokenizer.encode_all(text, "messages, in the model's chat template")
    with refusing("prompt"):
        if not isinstance(prompt, str):
            tokenizer.check(prompt, place)
            return prompt
        ids = tokenizer.encode(prompt, place)
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return first + ids or ([] if tokenizer.eos_id is None else [tokenizer.eos_id])


class TokenTexts:
    """Texts of single tokens: what each adds after another one."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer.tokenizer
        try:
            self._before = tokenizer.encode("a")[-1:]
        except SourceError:
            self._before = []
        self.text = cache(self._text)

    def raw(self, token: int) -> list[int] | None:
        """Return the bytes of a token; None where they are not known."""
        text = self.text(token)
        whole = INCOMPLETE not in text and not text.startswith("bytes:")
        return list(text.encode()) if whole else self._bytes(token)

    def _text(self, token: int) -> str:
        """Return the text of a token."""
        if self._tokenizer.id_to_token(token) is None:
            return f"token:{token}"  # a row of the embedding without a token
        before = self._tokenizer.decode(self._before, skip_special_tokens=False)
        both: str = self._tokenizer.decode([*self._before, token], skip_special_tokens=False)
        text = both.removeprefix(before)
        data = self._bytes(token) if INCOMPLETE in text else None
        return text if data is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token: int) -> list[int] | None:
        piece = self._tokenizer.id_to_token(token) or ""
        if alone := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece):
            return [int(alone[1], 16)]
        if piece and all(character in BYTE_CHARACTERS for character in piece):
            return [BYTE_CHARACTERS[character] for character in piece]
        return None


def usage(completions: Sequence[Completion], n: int) -> dict[str, int]:
    """Return the counts of tokens: of prompts, each once, and of those chosen (one that ends a completion too)."""
    prompts = sum(len(one.request.ids) for one in completions[::n])
    chosen = sum(one.tokens for one in completions)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": chosen,
        "total_tokens": prompts + chosen,
    }


class CompletionDocuments:
    """Documents of one response of ``/v1/completions``."""

    PREFIX, WHOLE, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, texts: TokenTexts) -> None:
        self.id = f"{self.PREFIX}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._texts = texts

    def whole(self, completions: Sequence[Piece]) -> dict[str, Any]:
        """Return the document of all completions."""
        choices = [self.choice(*numbered, whole=True) for numbered in enumerate(completions)]
        return {**self._head, "object": self.WHOLE, "choices": choices}

    def chunk(self, *pieces: tuple[int, Piece]) -> dict[str, Any]:
        """Return the chunk of pieces, each with the number of its completion."""
        choices = [self.choice(*numbered, whole=False) for numbered in pieces]
        return {**self._head, "object": self.CHUNK, "choices": choices}

    def opening(self, index: int) -> dict[str, Any] | None:  # noqa: ARG002 (of chats)
        """Return the chunk before the first piece of a completion, if there is one."""
        return None

    def choice(self, index: int, piece: Piece, *, whole: bool) -> dict[str, Any]:  # noqa: ARG002 (of chats)
        """Return a piece of the completion with the number ``index``, or ``whole`` of it."""
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.logprobs) if piece.logprobs else None,
            "finish_reason": piece.reason,
        }

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [self._texts.text(one.token) for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [self._top(one) for one in tokens],
            "text_offset": [one.offset for one in tokens],
        }

    def _top(self, one: TokenLogprob) -> dict[str, float] | None:
        if one.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            found.setdefault(self._texts.text(token), logprob)
        return found


class ChatDocuments(CompletionDocuments):
    """Documents of one response of ``/v1/chat/completions``."""

    PREFIX, WHOLE, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        """Return the chunk that says whose turn it is."""
        found = self.chunk((index, Piece()))
        found["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        return found

    def choice(self, index: int, piece: Piece, *, whole: bool) -> dict[str, Any]:
        """Return a message or what is new of it, as `CompletionDocuments.choice`."""
        name, said = "message", {"role": "assistant", "content": piece.text, "refusal": None}
        if not whole:
            name, said = "delta", {"content": piece.text} if piece.text or piece.logprobs else {}
        logprobs = {"content": [*map(self._scored, piece.logprobs)], "refusal": None}
        return {
            "index": index,
            name: said,
            "logprobs": logprobs if piece.logprobs else None,
            "finish_reason": piece.reason,
        }

    def _scored(self, one: TokenLogprob) -> Mapping[str, Any]:
        top = [self._token(token, logprob) for token, logprob in one.top]
        return {**self._token(one.token, one.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._texts.text(token),
            "logprob": logprob,
            "bytes": self._texts.raw(token),
        }
