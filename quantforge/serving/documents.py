r"""Documents of responses, as OpenAI's API has them: whole ones, and the chunks of a stream.

A token that is a part of a character has no text of its own. Its text is that of OpenAI's API: ``bytes:\xe4\xbd``.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from quantforge.formats.gguf.tokenizer_json import BYTE_CHARACTERS
from quantforge.runtime.token_stream import PARTIAL
from quantforge.serving.completions import Completion, Piece, TokenLogprob
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.tokenizer import TextTokenizer


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
        whole = PARTIAL not in text and not text.startswith("bytes:")
        return list(text.encode()) if whole else self._bytes(token)

    def _text(self, token: int) -> str:
        """Return the text of a token."""
        if self._tokenizer.id_to_token(token) is None:
            return f"token:{token}"  # a row of the embedding without a token
        before = self._tokenizer.decode(self._before, skip_special_tokens=False)
        both: str = self._tokenizer.decode([*self._before, token], skip_special_tokens=False)
        text = both.removeprefix(before)
        data = self._bytes(token) if PARTIAL in text else None
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
        choices = [self._choice(*numbered, whole=True) for numbered in enumerate(completions)]
        return {**self._head, "object": self.WHOLE, "choices": choices}

    def chunk(self, *pieces: tuple[int, Piece]) -> dict[str, Any]:
        """Return the chunk of pieces, each with the number of its completion."""
        choices = [self._choice(*numbered, whole=False) for numbered in pieces]
        return {**self._head, "object": self.CHUNK, "choices": choices}

    def opening(self, index: int) -> dict[str, Any] | None:  # noqa: ARG002 (of chats)
        """Return the chunk before the first piece of a completion, if there is one."""
        return None

    def _choice(self, index: int, piece: Piece, *, whole: bool) -> dict[str, Any]:  # noqa: ARG002 (of chats)
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

    def _choice(self, index: int, piece: Piece, *, whole: bool) -> dict[str, Any]:
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
