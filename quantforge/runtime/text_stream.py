"""Text of one completion while its tokens come: whole characters, up to a stop string. No torch.

A token of byte-level BPE may end in the middle of a character, and a decoder may drop a space at the beginning of what
it is given. So a piece of text is what some tokens add after the ones before them, and it waits while its end is no
whole character (decoders write U+FFFD there).

Stop strings are found wherever the pieces part: the longest end of the text that begins a stop string waits for what
follows. The text ends with the first character that completes a string, the longest one where it completes several.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantforge_calibration.tokenizer import TextTokenizer

BEFORE = 8  # tokens of the prompt that the first piece is decoded after
PARTIAL = "\ufffd"


class TextStream:
    """Text of tokens that come one by one after a prompt.

    Args:
        tokenizer: decodes them.
        prompt: its tokens.
        stop: strings that end the text.
        include: the string that ended the text is part of it.

    Attributes:
        decoded: characters of all whole text so far.
        sure: those that `add` has returned; the others may be the beginning of a stop string.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        *,
        include: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-BEFORE:])
        self._first, self._decoded_up_to = 0, len(self._ids)
        self._matcher = StopMatcher(stop, include=include)
        self.decoded = self.sure = 0

    @property
    def stopped_by(self) -> str | None:
        """Return the stop string that ended the text, or None."""
        return self._matcher.found

    def add(self, token: int) -> str:
        """Return the text that is sure now, often one word and sometimes none.

        Raises:
            SourceError: the tokenizer cannot decode.
        """
        self._ids.append(token)
        return self._model_layout(self._piece(whole=True))

    def rest(self) -> str:
        """Return the text that is left when no token follows; errors as `add`."""
        return self._model_layout(self._piece(whole=False)) + self._matcher.rest()

    def _model_layout(self, piece: str) -> str:
        sure = self._matcher.add(piece)
        self.decoded += len(piece)
        self.sure += len(sure)
        return sure

    def _piece(self, *, whole: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._first : self._decoded_up_to])
        now = self._tokenizer.decode(self._ids[self._first :])
        if len(now) <= len(before) or (whole and now.endswith(PARTIAL)):
            return ""
        self._first, self._decoded_up_to = self._decoded_up_to, len(self._ids)
        return now[len(before) :]


class StopMatcher:
    """Finder of stop strings in a text that comes in pieces.

    Args:
        stop: the strings.
        include: the string that ended the text is part of it.

    Attributes:
        found: the string that ended the text, or None.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop, self._include = stop, include
        self._waiting = ""  # the end of the text that could still become a stop string
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """Return the text that is sure now: no stop string, nor what could become one; none after the end."""
        if self.found is not None:
            return ""
        text = self._waiting + piece
        ends = [(text.find(one) + len(one), -len(one), one) for one in self._stop if one in text]
        if ends:
            end, _, self.found = min(ends)
            sure = end if self._include else end - len(self.found)
            self._waiting = ""
            return text[:sure]
        most = min(len(text), max(map(len, self._stop), default=0))
        starts = range(len(text) - most, len(text))
        begins = (at for at in starts if any(one.startswith(text[at:]) for one in self._stop))
        sure = next(begins, len(text))
        self._waiting = text[sure:]
        return text[:sure]

    def rest(self) -> str:
        """Return the text that waited, when no more comes."""
        return self._waiting
