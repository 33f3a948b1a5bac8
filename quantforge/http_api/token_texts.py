r"""Texts of single tokens, as log-probabilities are told: what a token adds behind another, or its bytes.

A token that is a part of a character has no text of its own. It is told as OpenAI tells it: ``bytes:\xe4\xbd``.
"""

from __future__ import annotations

import re

from quantforge.formats.gguf.pretokenizer import BYTE_CHARACTERS
from quantforge.runtime.token_stream import PARTIAL
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.tokenizer import TextTokenizer


class TokenTexts:
    """Texts of the tokens of a vocabulary, each worked out once."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer.tokenizer
        self._known: dict[int, str] = {}
        try:
            self._before = tokenizer.encode("a")[-1:]
        except SourceError:
            self._before = []

    def text(self, token: int) -> str:
        """Return the text of a token."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._text(token)
        return found

    def raw(self, token: int) -> list[int] | None:
        """Return the bytes of a token; None where they are not known."""
        found = self.text(token)
        if PARTIAL not in found and not found.startswith("bytes:"):
            return list(found.encode())
        return self._bytes(token)

    def _text(self, token: int) -> str:
        if self._tokenizer.id_to_token(token) is None:
            return f"token:{token}"  # a row of the embedding without a token
        before = self._tokenizer.decode(self._before, skip_special_tokens=False)
        both = self._tokenizer.decode([*self._before, token], skip_special_tokens=False)
        found: str = both[len(before) :] if both.startswith(before) else both
        if PARTIAL in found:
            data = self._bytes(token)
            if data is not None:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return found

    def _bytes(self, token: int) -> list[int] | None:
        piece = self._tokenizer.id_to_token(token) or ""
        alone = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
        if alone:
            return [int(alone[1], 16)]
        if piece and all(character in BYTE_CHARACTERS for character in piece):
            return [BYTE_CHARACTERS[character] for character in piece]
        return None
