"""The prefix cache: pages of tokens that were computed once are found again by all that begin with the same ones.

Keys and values of a token depend on it and on those before it. So a full page is known by a hash of its tokens and of
the page before, which stands for all that came earlier; the first hash stands for the kind of the cache. Whoever
begins with tokens that are known shares their pages. A page of which only a part is wanted is copied, since what
follows is written into it. Pages that nobody holds are kept until they are needed (`quantforge.runtime.page_pool`);
a request lets go of its last page first, so what many have in common stays longest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from quantforge.errors import InputError
from quantforge.runtime.cache import PagedCache
from quantforge.runtime.serving.entries import ServedEntry
from quantforge_kernels.kv import PAGE


@dataclass(frozen=True, slots=True)
class KnownPage:
    """A full page, by which it is found.

    Attributes:
        page: its number.
        digest: of its tokens and all before.
        parent: digest of the page before.
        tokens: its own.
    """

    page: int
    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]


class PrefixCache:
    """Index of full pages by their tokens.

    Args:
        cache: whose pages are shared.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._root = blake2b(cache.shape.kind.encode(), digest_size=16).digest()
        self._known: dict[bytes, KnownPage] = {}
        self._of_page: dict[int, KnownPage] = {}
        self._newest: dict[tuple[bytes, int], KnownPage] = {}  # by the page before and first token
        cache.pool.forgotten = self._forget

    def find(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Return pages of the longest known beginning of tokens, and its length; the last page may be used partly.

        The last token is left out: whoever goes on needs its logits.
        """
        most, parent = len(tokens) - 1, self._root
        pages: list[int] = []
        while (len(pages) + 1) * PAGE <= most:
            first = len(pages) * PAGE
            found = self._known.get(_digest(parent, tokens[first : first + PAGE]))
            if found is None:
                break
            pages.append(found.page)
            parent = found.digest
        length = len(pages) * PAGE
        partly = self._newest.get((parent, tokens[length])) if length < most else None
        if partly is not None:
            pages.append(partly.page)
            for known, wanted in zip(partly.tokens, tokens[length:most], strict=False):
                if known != wanted:
                    break
                length += 1
        return pages, length

    def begin(self, entry: ServedEntry, found: tuple[list[int], int]) -> int:
        """Begin the row of an entry with what was found; return the number of tokens that need not be computed."""
        assert entry.row is not None
        pages, length = found
        try:
            self._cache.adopt(entry.row, pages, length)
        except InputError:  # no page for a copy
            length -= length % PAGE
            self._cache.adopt(entry.row, pages, length)
        return length

    def note(self, entry: ServedEntry) -> None:
        """Take note of the pages of an entry that have become full."""
        assert entry.row is not None
        full, held = self._cache.length(entry.row) // PAGE, self._cache.held(entry.row)
        for number in range(len(entry.digests), full):
            tokens = tuple(entry.tokens[number * PAGE : (number + 1) * PAGE])
            parent = entry.digests[-1] if number else self._root
            digest = _digest(parent, tokens)
            entry.digests.append(digest)
            self._add(KnownPage(held[number], digest, parent, tokens))

    def _add(self, known: KnownPage) -> None:
        if known.digest not in self._known:
            self._known[known.digest] = self._of_page[known.page] = known
            self._newest[known.parent, known.tokens[0]] = known
            self._cache.pool.keep(known.page)

    def _forget(self, page: int) -> None:
        known = self._of_page.pop(page)
        del self._known[known.digest]
        if self._newest.get(start := (known.parent, known.tokens[0])) is known:
            del self._newest[start]


def _digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    return blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()
