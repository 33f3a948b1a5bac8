"""Views of a cache: the same pages under another table, or a sequence made a copy of another."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch

from quantforge.runtime.cache import PagedCache, raw_bytes
from quantforge_kernels.kv import PAGE


def view_of(cache: PagedCache, sequences: int) -> PagedCache:
    """Return a cache of so many sequences in the same pages, whose table and lengths others write."""
    view = copy(cache)
    view.table = cache.table.new_zeros(sequences, cache.table.shape[1])
    view.lengths = cache.lengths.new_zeros(sequences)
    view._held = [[] for _ in range(sequences)]
    view._counts = [0] * sequences
    return view


def show(cache: PagedCache, view: PagedCache, sequences: Sequence[int]) -> None:
    """Make the sequences of a view these of its cache, in order; the last one again and again where it has more."""
    more = view.sequences - len(sequences)
    at = torch.tensor([*sequences, *[sequences[-1]] * more], device=cache.lengths.device)
    view.table.copy_(cache.table[at])
    view.lengths.copy_(cache.lengths[at])


def spread(cache: PagedCache, sequence: int, rows: int) -> PagedCache:
    """Return a view in which ``rows`` sequences share the pages of one, and each has a length of its own.

    With lengths n, n+1, ... the next ``rows`` tokens of the sequence are computed as if each belonged to another
    one: all are written before any is attended to, and each sees those before it. Pages are those held now.
    """
    view = view_of(cache, rows)
    show(cache, view, [sequence])
    return view


def copy_rows(cache: PagedCache, parents: Sequence[int], same: int) -> None:
    """Make each sequence a copy of another one of the same length; they share no page.

    Args:
        cache: is changed.
        parents: for each sequence, the one to copy.
        same: so many first tokens each has in common with that one.
    """
    rows = [row for row, parent in enumerate(parents) if row != parent]
    longest = max(cache.length(row) for row in range(cache.sequences))
    pages = slice(same // PAGE, -(-longest // PAGE))
    to = cache.table[rows, pages].long()
    source = cache.table[[parents[row] for row in rows], pages].long()
    for store in (store for pair in cache.layers for store in pair):
        for part in map(raw_bytes, store.each()):
            part[to] = part[source]
