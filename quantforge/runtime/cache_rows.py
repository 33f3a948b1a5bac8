"""Rows of a cache made from others: one spread over many lengths, each a copy of another one, or a path of a tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantforge.runtime.cache import PagedCache
from quantforge.runtime.cache_view import CacheView
from quantforge.runtime.stored_entries import raw_bytes
from quantforge_kernels.kv import PAGE


def spread(cache: PagedCache, sequence: int, rows: int) -> PagedCache:
    """Return a view in which ``rows`` sequences share the pages of one, and each has a length of its own.

    With lengths n, n+1, ... the next ``rows`` tokens of the sequence are computed as if each belonged to another
    one: all are written before any is attended to, and each sees those before it. Pages are those held now.
    """
    view = CacheView(cache, rows)
    view.show([sequence])
    return view


def copy_rows(cache: PagedCache, parents: Sequence[int], same: int) -> None:
    """Make each sequence a copy of another one of the same length; they share no page.

    Args:
        cache: is changed.
        parents: for each sequence, the one to copy.
        same: so many first tokens each has in common with that one.
    """
    assert not cache.layout.rings
    rows = [row for row, parent in enumerate(parents) if row != parent]
    longest = max(cache.length(row) for row in range(cache.sequences))
    pages = slice(same // PAGE, -(-longest // PAGE))
    to = cache.table[rows, pages].long()
    source = cache.table[[parents[row] for row in rows], pages].long()
    for store in (store for pair in cache.layers for store in pair):
        for part in map(raw_bytes, store.each()):
            part[to] = part[source]


def keep_path(cache: PagedCache, sequence: int, start: int, nodes: Sequence[int]) -> None:
    """Keep one path of a tree of drafted tokens: move its places to those after ``start``; forget the rest.

    Args:
        cache: is changed.
        sequence: whose last tokens are the tree; it has ``start + len(nodes)`` tokens afterwards.
        start: tokens before the tree.
        nodes: places of the path in the tree, ascending.
    """
    if [*nodes] != [*range(len(nodes))]:
        device = cache.lengths.device
        source = torch.tensor(nodes, device=device) + start
        to = torch.arange(start, start + len(nodes), device=device)
        for layer, stores in enumerate(cache.layers):
            table = cache.table_of(layer)[sequence].long()
            old, new = (table[at // PAGE] * PAGE + at % PAGE for at in (source, to))
            for part in (raw_bytes(part) for store in stores for part in store.each()):
                flat = part.view(-1, *part.shape[2:])
                flat[new] = flat[old]
    cache.advance(sequence, start + len(nodes) - cache.length(sequence))
