"""Text of one completion while its tokens come: whole characters, up to a stop string. No torch.

A token of byte-level BPE may end in the middle of a character, and a decoder may drop a space at the beginning of what
it is given. So a piece of text is what some tokens add after the ones before them, and it waits while its end is no
whole character (decoders write U+FFFD there).

Stop strings are found wherever the pieces part. For each string its longest beginning that the text ends with is known
(Knuth, Morris and Pratt, 1977): what could still become a stop string is exactly the longest of these beginnings, and
waits. The table of the algorithm is made as far as a text has matched, so that a string of a megabyte costs nothing
until then, and time is linear in the length of the text for each string. The text ends with the first character that
completes a string; of several that it completes the longest counts.
"""

from __future__ import annotations

from array import array
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
        return self._matched(self._piece(whole=True))

    def rest(self) -> str:
        """Return the text that is left when no token follows; errors as `add`."""
        return self._matched(self._piece(whole=False)) + self._matcher.rest()

    def _matched(self, piece: str) -> str:
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
        self._needles = [_Needle(one) for one in stop]
        self._include = include
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """Return the text that is sure now: no stop string, nor what could become one; none after the end."""
        if not self._needles:
            return piece
        if self.found is not None:
            return ""
        held, waited = self._held()
        used = len(piece)
        for place, character in enumerate(piece):
            for one in self._needles:
                one.step(character)
            ended = [one.text for one in self._needles if one.matched == len(one.text)]
            if ended:
                self.found, used = max(ended, key=len), place + 1
                break
        waits = self._held()[1]
        if self.found is not None:
            waits = 0 if self._include else len(self.found)
        sure = waited + used - waits
        if sure <= waited:  # a piece may release nothing of a megabyte that waits: it is not copied
            return held[:sure]
        return held[:waited] + piece[: sure - waited]

    def rest(self) -> str:
        """Return the text that waited, when no more comes."""
        held, waited = ("", 0) if self.found is not None else self._held()
        return held[:waited]

    def _held(self) -> tuple[str, int]:
        """Return a string and how much of its beginning waits."""
        one = max(self._needles, key=lambda needle: needle.matched, default=None)
        return ("", 0) if one is None else (one.text, one.matched)


class _Needle:
    """A stop string, and how much of its beginning the text ends with."""

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        # Of each beginning of `text`, the longest other beginning that it ends with.
        self._borders = array("q")

    def step(self, character: str) -> None:
        """Take the next character of the text; after a whole match nothing may follow."""
        self.matched = self._grown(self.matched, character)
        while len(self._borders) < self.matched:
            place = len(self._borders)
            last = self._borders[-1] if place else 0
            self._borders.append(self._grown(last, self.text[place]) if place else 0)

    def _grown(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._borders[matched - 1]
        return matched + (self.text[matched] == character)
