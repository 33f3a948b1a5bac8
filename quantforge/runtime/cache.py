"""The paged cache of keys and values: fixed pages, a table per sequence, a list of free pages.

Token ``t`` of sequence ``s`` lies in page ``table[s, t // PAGE]`` at place ``t % PAGE``, in every
layer. Sequences of any length share one pool and waste less than a page each; evicting a sequence
only edits the table. Layers with a window may go round in a few pages instead (`cache_layout`).
Entries are stored in the type of the activations, or quantized once as they arrive
(`quantforge_kernels.kv`), and attention always reads what is stored.

Lengths and table are tensors on the device, so that a decoding step that was captured as a CUDA
graph finds the place of each new token by itself; the host keeps its own count to refuse what does
not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.runtime.cache_layout import PAGED, CacheLayout, CacheShape
from quantforge.runtime.room import check_cache, free_bytes
from quantforge.runtime.stored_entries import (
    LayerScales,
    raw_bytes,
    read_pages,
    spread_scales,
    write_entries,
)
from quantforge_kernels.kv import PAGE


class PagedCache:
    """Keys and values of some sequences.

    Args:
        shape: of the entries.
        sequences: how many at a time.
        tokens: most tokens of a sequence.
        device: where it lies.
        pages: in all; enough for every sequence to be full when left out.
        scales: by layer, measured scales of keys and values, for a cache in fp8.
        ahead: most tokens of a sequence that are written before they are attended to, if rows are not made
            shorter by more: layers with a window then keep what it holds, see `quantforge.runtime.cache_layout`.

    Attributes:
        pages: in all, of layers without a ring.
        layout: of its layers.
        keys: of its layers, see `CacheLayout`.
        tables: by key, the page of every place of a row, ``[sequences, most pages]``.

    Raises:
        InputError: no sequence, no token, or no page.
        ResourceError: a GPU has no room for it.
    """

    def __init__(
        self,
        shape: CacheShape,
        sequences: int,
        tokens: int,
        device: torch.device,
        pages: int | None = None,
        scales: LayerScales | None = None,
        ahead: int = 0,
    ) -> None:
        if sequences < 1 or tokens < 1 or (pages is not None and pages < 1):
            of = "" if pages is None else f" in {pages} pages"
            raise InputError(
                f"a cache of {sequences} sequences of {tokens} tokens{of}", "at least one of each"
            )
        self.layout = CacheLayout(shape, tokens, ahead)
        self.keys = self.layout.keys
        each = -(-tokens // PAGE)
        paged = PAGED in self.keys  # else there is nothing in the pool that could run out
        count = sequences * each if pages is None or not paged else pages
        needed = count * self.layout.page_bytes + sequences * self.layout.ring_bytes
        size_of = (sequences, tokens) if pages is None else (1, pages * PAGE)
        check_cache(shape, *size_of, free_bytes(device), needed)
        self.shape = shape
        self._scales = spread_scales(scales or {}, shape, device)
        self.most_tokens = tokens
        self.layers = self.layout.stores(sequences, count, device)
        table = torch.zeros(sequences, each, dtype=torch.int32, device=device)
        self.tables = {PAGED: table, **self.layout.ring_tables(sequences, device)}
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.pages = count
        self._free = list(range(count))[::-1]
        self._held: list[list[int]] = [[] for _ in range(sequences)]
        self._counts = [0] * sequences

    @property
    def table(self) -> Tensor:
        """Return the pages of layers without a ring."""
        return self.tables[PAGED]

    def table_of(self, layer: int) -> Tensor:
        """Return the pages of a layer, ``[sequences, most pages]`` int32."""
        return self.tables[self.keys[layer]]

    @property
    def free(self) -> int:
        """Return the number of free pages."""
        return len(self._free)

    @property
    def sequences(self) -> int:
        """Return the number of sequences that it has room for."""
        return len(self._held)

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        return self._counts[sequence]

    def held(self, sequence: int) -> tuple[int, ...]:
        """Return the pages of a sequence, in order."""
        return tuple(self._held[sequence])

    def wanted(self, sequence: int, tokens: int) -> int:
        """Return how many more pages a sequence needs for ``tokens`` tokens in all."""
        return max(0, -(-tokens // PAGE) - len(self._held[sequence]))

    def reserve(self, sequence: int, tokens: int) -> None:
        """Make sure that a sequence has pages for ``tokens`` tokens in all.

        Raises:
            InputError: more than a sequence, or the pool, has room for.
        """
        held, wanted = self._held[sequence], self.wanted(sequence, tokens)
        if tokens > self.most_tokens or wanted > self.free:
            room = min(self.most_tokens, PAGE * (len(held) + self.free))
            raise InputError(
                f"sequence {sequence} needs a cache of {tokens} tokens, there is room for {room}",
                "shorten the prompt, ask for fewer new tokens, or make the cache larger",
            )
        for _ in range(wanted):
            self._append(sequence, self._free.pop())

    def _append(self, sequence: int, page: int) -> None:
        self.table[sequence, len(self._held[sequence])] = page
        self._held[sequence].append(page)

    def shorten(self, sequence: int, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens of a sequence; pages beyond them are free again."""
        held, kept = self._held[sequence], -(-tokens // PAGE)
        assert tokens <= self._counts[sequence]
        while len(held) > kept:
            self._free.append(held.pop())
        self.advance(sequence, tokens - self._counts[sequence])

    def release(self, sequence: int) -> None:
        """Forget a sequence; its pages are free again."""
        self.shorten(sequence, 0)

    def advance(self, sequence: int, tokens: int) -> None:
        """Note, on the host and on the device, that one sequence has so many tokens more."""
        self._counts[sequence] += tokens
        self.lengths[sequence] = self._counts[sequence]

    def follow(self, sequences: Sequence[int]) -> None:
        """Note that each of some sequences has a token more; as `advance`, for all at once."""
        for sequence in sequences:
            self._counts[sequence] += 1
        self.lengths[torch.tensor(sequences, device=self.lengths.device)] += 1

    def slots(self, tokens: int) -> dict[int, Tensor]:
        """Return the places ``[sequences, tokens]`` of the next tokens of every sequence in the pages, by key."""
        self.layout.expect(tokens)
        new = torch.arange(tokens, device=self.lengths.device)
        at = self.lengths[:, None].long() + new
        return {
            key: table.long().gather(1, at // PAGE) * PAGE + at % PAGE
            for key, table in self.tables.items()
        }

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``[tokens, kv_heads, head]`` at ``slots`` ``[tokens]``."""
        scales = self._scales.get(layer, (None, None))
        write_entries(self.layers[layer], (keys, values), slots, scales)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Read pages ``[sequences, pages]``, decoded: ``[sequences, pages * PAGE, kv_heads, head]`` each."""
        return read_pages(self.layers[layer], table, self.shape.dtype)

    def count(self, tokens: int) -> None:
        """Note on the host that every sequence has grown; ``lengths`` is advanced by `Decoder.enter`."""
        for sequence in range(self.sequences):
            self._counts[sequence] += tokens


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
