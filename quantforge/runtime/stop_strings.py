"""Strings that end a text, found while it comes in pieces, wherever the pieces part.

For each string its longest beginning that the text ends with is known (Knuth, Morris and Pratt, 1977): what could still
become a stop string is exactly the longest of these beginnings, and waits. The table of the algorithm is made as far as
a text has matched, so that a string of a megabyte costs nothing until then, and time is linear in the length of the
text for each string.

The text ends with the first character that completes a string; of several that it completes the longest counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quantforge.errors import UsageError


def check_stop(stop: object) -> tuple[str, ...]:
    """Return stop strings, given as one text or several.

    Raises:
        UsageError: one is empty, or no Unicode text.
    """
    rule = "a text, or a list of texts, none of them empty"
    found = (stop,) if isinstance(stop, str) else stop
    if not isinstance(found, Sequence) or isinstance(found, bytes):
        raise UsageError(f"stop = {stop!a:.60}", rule)
    for one in found:
        if not isinstance(one, str) or not one:
            raise UsageError(f"stop holds {one!a:.60}", rule)
        try:
            one.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"stop holds {one!a:.60}, which is no Unicode text", rule) from error
    return tuple(found)


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
        self._borders = array(
            "q"
        )  # of each beginning of `text`, the longest other beginning that it ends with

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
