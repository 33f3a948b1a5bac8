r"""Completions in progress: convert prompts to engine requests, generated tokens to text, and text to API documents.

Text is sent as soon as it is final: whole characters that cannot be the beginning of a stop string. Log-probabilities
of tokens are sent together with their text.

The documents are those of OpenAI's API: complete responses, and the chunks of a stream. A token that is only part of a
character has no text of its own; as in OpenAI's API, its text is then ``bytes:\xe4\xbd``.
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
from quantforge.serving.api_error import ApiError, source_error_as_refusal
from quantforge.serving.request_bodies import Body, Prompt
from quantforge_calibration.conversations import Conversation
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability.

    Attributes:
        token: token id.
        logprob: log-probability in nats; None for the first token of a prompt.
        top: the most likely tokens with their log-probabilities.
        offset: number of characters of the completion before the token.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The next piece of a completion.

    Attributes:
        text: new text.
        logprobs: log-probabilities of the tokens that begin in the text, if requested.
        reason: why the completion has ended, ``stop`` or ``length``; None if it has not.
    """

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    reason: str | None = None


def join_pieces(pieces: Iterable[TextPiece]) -> TextPiece:
    """Concatenate consecutive pieces of a completion."""
    piece_list = [*pieces]
    text = "".join(piece.text for piece in piece_list)
    logprobs = tuple(chain.from_iterable(piece.logprobs for piece in piece_list))
    return TextPiece(text, logprobs, piece_list[-1].reason if piece_list else None)


class Completion:
    """One completion of a request.

    Args:
        index: index of the completion within the request.
        request: request to the engine.
        processor: decodes the tokens.
        body: body of the HTTP request.
        prompt: the prompt as it was sent.

    Attributes:
        tokens: number of generated tokens.
    """

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        processor: TextProcessor,
        body: Body,
        prompt: Prompt,
    ) -> None:
        self.index, self.request, self.tokens = index, request, 0
        self._tokenizer, self._body, self._prompt = processor.tokenizer, body, prompt
        self._stop_tokens = frozenset() if body.ignore_eos else processor.stop
        self._stream = TextStream(
            processor.tokenizer,
            request.ids,
            body.stops,
            include_stop=body.include_stop_str_in_output,
        )
        self._echo_pending = body.echo
        self._prompt_scores = [ChosenToken(request.ids[0])]
        self._echoed_characters = 0  # characters of the prompt that were sent
        self._pending_logprobs: list[TokenLogprob] = []

    def add(self, event: EngineEvent) -> TextPiece:
        """Process an event of the engine and return the next piece; a piece with a reason is the last one.

        Raises:
            ApiError: the completion failed, or the server is stopping.
            SourceError: the tokenizer cannot decode.
        """
        if isinstance(event, PromptScored):
            self._prompt_scores += event.tokens
            return TextPiece()
        if isinstance(event, Finished):
            _raise_if_failed(event)
        first = self._echo_prompt() if self._echo_pending else TextPiece()
        return join_pieces(
            [first, self._finish(event) if isinstance(event, Finished) else self._add_token(event)]
        )

    def _add_token(self, event: NewToken) -> TextPiece:
        """Decode a new token and return the text that is final."""
        if self._body.max_tokens == 0:  # the prompt alone is asked for
            return TextPiece()
        self.tokens += 1
        if self._body.top_logprobs_count is not None:
            logprob = TokenLogprob(
                event.token,
                event.logprob,
                event.top,
                self._echoed_characters + self._stream.decoded,
            )
            self._pending_logprobs.append(logprob)
        if event.token in self._stop_tokens:
            return TextPiece()
        text = self._stream.add(event.token)
        return TextPiece(
            text, self._release_logprobs(), "stop" if self._stream.stopped_by else None
        )

    def _finish(self, event: Finished) -> TextPiece:
        """Return the last piece."""
        text = self._stream.flush()
        if self._stream.stopped_by is not None:
            return TextPiece(text, self._release_logprobs(), "stop")
        stopped = event.reason == FinishReason.STOP
        return TextPiece(text, tuple(self._pending_logprobs), "stop" if stopped else "length")

    def _release_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of tokens that begin in the text sent so far."""
        count = sum(
            logprob.offset < self._echoed_characters + self._stream.emitted
            for logprob in self._pending_logprobs
        )
        released, self._pending_logprobs = (
            self._pending_logprobs[:count],
            self._pending_logprobs[count:],
        )
        return tuple(released)

    def _echo_prompt(self) -> TextPiece:
        """Return the prompt as the first piece."""
        self._echo_pending = False
        stream, text, logprobs = TextStream(self._tokenizer, ()), "", []
        for index, token in enumerate(self.request.ids):
            if self._body.top_logprobs_count is not None:
                score = self._prompt_scores[index]
                logprobs.append(TokenLogprob(token, score.logprob, score.top, len(text)))
            text += stream.add(token)
        text = self._prompt if isinstance(self._prompt, str) else text + stream.flush()
        self._echoed_characters = len(text)
        return TextPiece(text, tuple(logprobs))


def _raise_if_failed(event: Finished) -> None:
    """Raise `ApiError` if a completion failed or was cancelled."""
    if event.reason == FinishReason.ERROR:
        raise ApiError(f"the completion failed: {event.error}", 500, code="engine_error")
    if event.reason == FinishReason.CANCELLED:
        raise ApiError("the server is stopping", 503, code="stopping")


def start_completions(
    response_id: str, processor: TextProcessor, body: Body, max_total_tokens: int
) -> list[Completion]:
    """Create the completions that a body requests: ``n`` for each prompt.

    Args:
        response_id: id of the response, from which the ids of engine requests are derived.
        processor: encodes prompts and decodes tokens.
        body: body of the HTTP request.
        max_total_tokens: maximum number of tokens of a prompt with its completion.

    Raises:
        ApiError: a prompt cannot be encoded or rendered, is empty, or leaves too little room for the completion; a
            token has no row in the embedding.
    """
    sampling = replace(body.sampling, logprobs=body.top_logprobs_count)
    with source_error_as_refusal("logit_bias"):
        processor.tokenizer.check(sampling.logit_bias, "logit_bias")
    completions: list[Completion] = []
    prompts = body.prompts
    for number, prompt in enumerate(prompts):
        ids = _encode_prompt(
            processor, prompt, f"prompt[{number}]" if len(prompts) > 1 else "prompt"
        )
        param = "messages" if isinstance(prompt, Conversation) else "prompt"
        if not ids:
            raise ApiError("the prompt has no tokens", param=param, code="empty_prompt")
        remaining = max_total_tokens - len(ids)
        max_tokens = remaining if body.max_tokens is None else body.max_tokens
        if remaining < max(1, max_tokens):
            raise ApiError(
                f"the prompt has {len(ids)} tokens, and {max(1, max_tokens)} more are asked for; "
                f"there is room for {max_total_tokens} in all: shorten the prompt, or ask for fewer",
                param="max_tokens" if remaining > 0 else param,
                code="context_length_exceeded",
            )
        stop_tokens = frozenset() if body.ignore_eos or not max_tokens else processor.stop
        for choice in range(body.n):
            index = len(completions)
            request = GenerationRequest(
                f"{response_id}/{index}",
                tuple(ids),
                max(1, max_tokens),  # where none is asked for, one is computed and not sent
                stop_tokens,
                sampling.for_choice(choice),
                body.top_logprobs_count if body.echo else None,
            )
            completions.append(Completion(index, request, processor, body, prompt))
    return completions


def _encode_prompt(processor: TextProcessor, prompt: Prompt, location: str) -> Sequence[int]:
    """Return the token ids of a prompt; raises as `start_completions` does."""
    tokenizer = processor.tokenizer
    if isinstance(prompt, Conversation):
        if processor.template is None:
            raise ApiError(
                "the model has no chat template, so it cannot be shown a conversation; send a text to /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        with source_error_as_refusal(
            "messages", "chat_template", "/v1/completions takes a text as it is"
        ):
            text = processor.template.render(prompt, add_generation_prompt=True)
        with source_error_as_refusal("messages"):
            return tokenizer.encode_with_special_tokens(
                text, "messages, in the model's chat template"
            )
    with source_error_as_refusal("prompt"):
        if not isinstance(prompt, str):
            tokenizer.check(prompt, location)
            return prompt
        ids = tokenizer.encode(prompt, location)
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return first + ids or ([] if tokenizer.eos_id is None else [tokenizer.eos_id])


class TokenTexts:
    """Texts of single tokens: the text that each adds after another token."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer.tokenizer
        try:
            self._before = tokenizer.encode("a")[-1:]
        except SourceError:
            self._before = []
        self.text = cache(self._text)

    def token_bytes(self, token: int) -> list[int] | None:
        """Return the bytes of a token; None if they are not known."""
        text = self.text(token)
        is_text = INCOMPLETE not in text and not text.startswith("bytes:")
        return list(text.encode()) if is_text else self._bytes(token)

    def _text(self, token: int) -> str:
        """Return the text of a token."""
        if self._tokenizer.id_to_token(token) is None:
            return f"token:{token}"  # a row of the embedding without a token
        text_before = self._tokenizer.decode(self._before, skip_special_tokens=False)
        joined_text: str = self._tokenizer.decode([*self._before, token], skip_special_tokens=False)
        text = joined_text.removeprefix(text_before)
        data = self._bytes(token) if INCOMPLETE in text else None
        return text if data is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token: int) -> list[int] | None:
        """Return the bytes that a byte-level token stands for, or None for other tokens."""
        token_text = self._tokenizer.id_to_token(token) or ""
        if byte_token := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token_text):
            return [int(byte_token[1], 16)]
        if token_text and all(character in BYTE_CHARACTERS for character in token_text):
            return [BYTE_CHARACTERS[character] for character in token_text]
        return None


def usage(completions: Sequence[Completion], n: int) -> dict[str, int]:
    """Return the token counts of a response; each prompt counts once, and end tokens count as completion tokens."""
    prompt_tokens = sum(len(completion.request.ids) for completion in completions[::n])
    completion_tokens = sum(completion.tokens for completion in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class CompletionDocuments:
    """Creates the documents of one response of ``/v1/completions``."""

    PREFIX, COMPLETE, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, texts: TokenTexts) -> None:
        self.id = f"{self.PREFIX}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._texts = texts

    def complete(self, completions: Sequence[TextPiece]) -> dict[str, Any]:
        """Return the response document of complete completions."""
        choices = [self.choice(*numbered, complete=True) for numbered in enumerate(completions)]
        return {**self._head, "object": self.COMPLETE, "choices": choices}

    def chunk(self, *pieces: tuple[int, TextPiece]) -> dict[str, Any]:
        """Return the stream chunk of some pieces, each given with the index of its completion."""
        choices = [self.choice(*numbered, complete=False) for numbered in pieces]
        return {**self._head, "object": self.CHUNK, "choices": choices}

    def first_chunk(self, index: int) -> dict[str, Any] | None:  # noqa: ARG002 (of chats)
        """Return the chunk that precedes the first piece of a completion, or None."""
        return None

    def choice(self, index: int, piece: TextPiece, *, complete: bool) -> dict[str, Any]:  # noqa: ARG002 (of chats)
        """Return the ``choices`` entry of a piece; ``complete`` is false for a stream chunk."""
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.logprobs) if piece.logprobs else None,
            "finish_reason": piece.reason,
        }

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the ``logprobs`` object of some tokens."""
        return {
            "tokens": [self._texts.text(token.token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float] | None:
        """Return the texts of the most likely tokens with their log-probabilities, including the generated token."""
        if entry.logprob is None:
            return None
        logprobs: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            logprobs.setdefault(self._texts.text(token), logprob)
        return logprobs


class ChatDocuments(CompletionDocuments):
    """Creates the documents of one response of ``/v1/chat/completions``."""

    PREFIX, COMPLETE, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunk(self, index: int) -> dict[str, Any]:
        """Return the chunk that declares the role of the message."""
        chunk = self.chunk((index, TextPiece()))
        chunk["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        return chunk

    def choice(self, index: int, piece: TextPiece, *, complete: bool) -> dict[str, Any]:
        """Return the ``choices`` entry with a message, or a message delta for a stream chunk."""
        name, message = "message", {"role": "assistant", "content": piece.text, "refusal": None}
        if not complete:
            name, message = "delta", {"content": piece.text} if piece.text or piece.logprobs else {}
        logprobs = {"content": [*map(self._scored, piece.logprobs)], "refusal": None}
        return {
            "index": index,
            name: message,
            "logprobs": logprobs if piece.logprobs else None,
            "finish_reason": piece.reason,
        }

    def _scored(self, entry: TokenLogprob) -> Mapping[str, Any]:
        """Return the entry of a generated token with the most likely tokens."""
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        """Return text, log-probability and bytes of a token."""
        return {
            "token": self._texts.text(token),
            "logprob": logprob,
            "bytes": self._texts.token_bytes(token),
        }
