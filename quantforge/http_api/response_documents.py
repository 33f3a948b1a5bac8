"""Documents of answers: whole ones and chunks of a stream, of completions and of chats."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from quantforge.http_api.answer_text import AnswerPiece, ToldToken
from quantforge.http_api.token_texts import TokenTexts


class AnswerDocuments(Protocol):
    """Documents of the answers of one request."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the chunk that comes before the first piece of an answer."""

    def chunk(self, index: int, piece: AnswerPiece) -> dict[str, Any]:
        """Return the chunk of a piece."""

    def whole(self, answers: Sequence[AnswerPiece]) -> dict[str, Any]:
        """Return the document of all answers."""

    def head(self) -> dict[str, Any]:
        """Return a chunk without an answer."""


def usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    """Return the count of tokens: those of prompts, those that were chosen (one that ends an answer too)."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }


class _Documents:
    KIND, CHUNK = "", ""

    def __init__(self, id: str, model: str, texts: TokenTexts) -> None:  # noqa: A002 (the name of the field)
        self._head = {"id": id, "created": int(time.time()), "model": model}
        self._texts = texts

    def head(self) -> dict[str, Any]:
        return {**self._head, "object": self.CHUNK, "choices": []}

    def _of(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": [*choices]}


class CompletionDocuments(_Documents):
    """Documents of ``/v1/completions``."""

    KIND = CHUNK = "text_completion"

    def opening(self, index: int) -> None:
        """Return nothing: pieces are enough."""

    def chunk(self, index: int, piece: AnswerPiece) -> dict[str, Any]:
        """Return the chunk of a piece."""
        return self._of(self.CHUNK, [self._choice(index, piece)])

    def whole(self, answers: Sequence[AnswerPiece]) -> dict[str, Any]:
        """Return the document of all answers."""
        return self._of(self.KIND, [self._choice(n, answer) for n, answer in enumerate(answers)])

    def _choice(self, index: int, piece: AnswerPiece) -> dict[str, Any]:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.scored) if piece.scored else None,
            "finish_reason": piece.reason,
        }

    def _logprobs(self, scored: Sequence[ToldToken]) -> dict[str, Any]:
        return {
            "tokens": [self._texts.text(one.token) for one in scored],
            "token_logprobs": [one.logprob for one in scored],
            "top_logprobs": [self._top(one) for one in scored],
            "text_offset": [one.offset for one in scored],
        }

    def _top(self, one: ToldToken) -> dict[str, float] | None:
        if one.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            found.setdefault(self._texts.text(token), logprob)
        return found


class ChatDocuments(_Documents):
    """Documents of ``/v1/chat/completions``."""

    KIND, CHUNK = "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        """Return the chunk that says who speaks."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._of(self.CHUNK, [choice])

    def chunk(self, index: int, piece: AnswerPiece) -> dict[str, Any]:
        """Return the chunk of a piece."""
        delta = {"content": piece.text} if piece.text or piece.scored else {}
        return self._of(self.CHUNK, [self._choice(index, "delta", delta, piece)])

    def whole(self, answers: Sequence[AnswerPiece]) -> dict[str, Any]:
        """Return the document of all answers."""
        choices = []
        for index, answer in enumerate(answers):
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            choices.append(self._choice(index, "message", message, answer))
        return self._of(self.KIND, choices)

    def _choice(
        self, index: int, name: str, said: Mapping[str, Any], piece: AnswerPiece
    ) -> dict[str, Any]:
        told = {"content": [*map(self._scored, piece.scored)], "refusal": None}
        logprobs = told if piece.scored else None
        return {"index": index, name: said, "logprobs": logprobs, "finish_reason": piece.reason}

    def _scored(self, one: ToldToken) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in one.top]
        return {**self._token(one.token, one.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, data = self._texts.text(token), self._texts.raw(token)
        return {"token": text, "logprob": logprob, "bytes": data}
