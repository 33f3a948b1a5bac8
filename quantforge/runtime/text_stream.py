"""Incremental detokenization of one completion: whole characters only, cut at stop strings. Imports no torch.

A byte-level BPE token may end in the middle of a character, and a tokenizer may drop a space at the start of the text
it decodes. So each piece is the difference between decoding with and without the new tokens, after a few tokens of
context, and it is held back while it ends in an incomplete character (decoded as U+FFFD).

Stop strings are also found across pieces: the longest suffix of the text that is a prefix of a stop string is held
back. The text ends at the first character that completes a stop string; the
longest one counts if it completes several.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantforge_calibration.tokenizer import TextTokenizer

CONTEXT_TOKENS = 8  # last tokens of the prompt that are decoded together with the first piece
INCOMPLETE = "\ufffd"


class TextStream:
    """Detokenizer of a stream of tokens that follows a prompt.

    Args:
        tokenizer: decodes tokens to text.
        prompt: token ids of the prompt.
        stop: stop strings.
        include_stop: keep the stop string at the end of the text.

    Attributes:
        decoded: number of characters decoded so far.
        emitted: number of characters that `add` has returned; the rest may be the start of a stop string.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._first, self._decoded_up_to = 0, len(self._ids)
        self._matcher = StopMatcher(stop, include_stop=include_stop)
        self.decoded = self.emitted = 0

    @property
    def stopped_by(self) -> str | None:
        """Return the stop string that ended the text, or None."""
        return self._matcher.matched

    def add(self, token: int) -> str:
        """Append a token; return the text that is final now, often one word and sometimes "".

        Raises:
            SourceError: the tokenizer cannot decode.
        """
        self._ids.append(token)
        return self._match_stop(self._decode_new_text(complete_only=True))

    def flush(self) -> str:
        """Return the text that was held back, when no token follows; raises as `add` does."""
        return self._match_stop(self._decode_new_text(complete_only=False)) + self._matcher.flush()

    def _match_stop(self, piece: str) -> str:
        emitted = self._matcher.add(piece)
        self.decoded += len(piece)
        self.emitted += len(emitted)
        return emitted

    def _decode_new_text(self, *, complete_only: bool) -> str:
        context_text = self._tokenizer.decode(self._ids[self._first : self._decoded_up_to])
        full_text = self._tokenizer.decode(self._ids[self._first :])
        if len(full_text) <= len(context_text) or (
            complete_only and full_text.endswith(INCOMPLETE)
        ):
            return ""
        self._first, self._decoded_up_to = self._decoded_up_to, len(self._ids)
        return full_text[len(context_text) :]


class StopMatcher:
    """Matcher of stop strings in a text that arrives in pieces.

    Args:
        stop: the stop strings.
        include_stop: keep the stop string at the end of the text.

    Attributes:
        matched: the stop string that ended the text, or None.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self._stop, self._include = stop, include_stop
        self._pending = ""  # the end of the text that could still become a stop string
        self.matched: str | None = None

    def add(self, piece: str) -> str:
        """Append a piece; return the text that is final now: it contains no stop string and no start of one at its end.

        After a stop string was found, the result is always "".
        """
        if self.matched is not None:
            return ""
        text = self._pending + piece
        matches = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text
        ]
        if matches:
            end, _, self.matched = min(matches)
            end = end if self._include else end - len(self.matched)
            self._pending = ""
            return text[:end]
        longest = min(len(text), max(map(len, self._stop), default=0))
        starts = range(len(text) - longest, len(text))
        stop_starts = (
            start for start in starts if any(stop.startswith(text[start:]) for stop in self._stop)
        )
        end = next(stop_starts, len(text))
        self._pending = text[end:]
        return text[:end]

    def flush(self) -> str:
        """Return the text that was held back, when no piece follows."""
        return self._pending
