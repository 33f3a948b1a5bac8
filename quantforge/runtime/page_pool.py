"""Pages of a cache: which are free, and by how many each of the others is held.

A page that several sequences read, or that is kept for later ones, has as many holders; it is free when the last of
them lets go. Only a sole holder writes to a page.
"""

from __future__ import annotations


class PagePool:
    """Free pages, and the number of holders of the others.

    Args:
        pages: in all; they are numbered from 0.
    """

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages))[::-1]
        self._holders = [0] * pages

    @property
    def pages(self) -> int:
        """Return the number of pages, free or not."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Return the number of free pages."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """Return by how many a page is held."""
        return self._holders[page]

    def take(self) -> int:
        """Return a page that was free (there is one), with one holder."""
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> int:
        """Add a holder to a page that has one; return the page."""
        assert self._holders[page] > 0
        self._holders[page] += 1
        return page

    def drop(self, page: int) -> None:
        """Let go of a page."""
        assert self._holders[page] > 0
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)
