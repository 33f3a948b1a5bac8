"""Some sequences of a cache, as if they were all of one: what is recorded for so many sequences serves any of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantforge.runtime.cache import PagedCache


class CacheView(PagedCache):
    """A cache in the pages of another one.

    Args:
        cache: whose pages are read and written.
        sequences: how many at a time.
    """

    def __init__(self, cache: PagedCache, sequences: int) -> None:
        self.__dict__.update(cache.__dict__)
        self._whole = cache
        self.tables = {
            key: table.new_zeros(sequences, table.shape[1]) for key, table in cache.tables.items()
        }
        self.lengths = cache.lengths.new_zeros(sequences)
        self._held = [[] for _ in range(sequences)]
        self._counts = [0] * sequences

    def show(self, sequences: Sequence[int]) -> None:
        """Make the sequences these of the cache, in order; the last of them, over and over, where there are too few."""
        more = self.sequences - len(sequences)
        at = torch.tensor([*sequences, *[sequences[-1]] * more], device=self.lengths.device)
        for key, table in self.tables.items():
            table.copy_(self._whole.tables[key][at])
        self.lengths.copy_(self._whole.lengths[at])
