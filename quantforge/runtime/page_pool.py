"""Pages of a cache: which are free, and by how many each of the others is held.

A page that several sequences read has as many holders. Only a sole holder writes to a page. When the last one lets go,
the page is free; if it is kept for later ones it keeps its contents until no other free page is left, and then the one
that was let go first is taken.
"""

from __future__ import annotations

from collections.abc import Callable


class PagePool:
    """Free pages, and the number of holders of the others.

    Args:
        pages: in all; they are numbered from 0.

    Attributes:
        forgotten: is told of a page that is no longer kept.
    """

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages))[::-1]
        self._holders = [0] * pages
        self._kept: set[int] = set()
        self._idle: dict[int, None] = {}  # kept, without holder; the first let go comes first
        self.forgotten: Callable[[int], None] = lambda page: None  # noqa: ARG005

    @property
    def pages(self) -> int:
        """Return the number of pages, free or not."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Return the number of pages without holder."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Return how many of the free pages are kept for later."""
        return len(self._idle)

    def holders(self, page: int) -> int:
        """Return by how many a page is held."""
        return self._holders[page]

    def take(self) -> int:
        """Return a page that was free (there is one), with one holder."""
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._idle))
            del self._idle[page]
            self._forget(page)
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> int:
        """Add a holder to a page that has one, or is kept; return the page."""
        assert self._holders[page] > 0 or page in self._idle
        self._idle.pop(page, None)
        self._holders[page] += 1
        return page

    def drop(self, page: int) -> None:
        """Let go of a page."""
        assert self._holders[page] > 0
        self._holders[page] -= 1
        if not self._holders[page]:
            if page in self._kept:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """Keep what is in a page that is held, as long as there are other free ones, for those who come later."""
        assert self._holders[page] > 0
        self._kept.add(page)

    def change(self, page: int) -> None:
        """Note that the sole holder of a page writes to it again: what was in it is not kept."""
        assert self._holders[page] == 1
        if page in self._kept:
            self._forget(page)

    def _forget(self, page: int) -> None:
        self._kept.remove(page)
        self.forgotten(page)
