"""The paged cache of keys and values: fixed pages, a table per sequence, a list of free pages.

Token ``t`` of sequence ``s`` lies in page ``table[s, t // PAGE_SIZE]`` at place ``t % PAGE_SIZE``, in every
layer. Sequences of any length share one pool and waste less than a page each; evicting a sequence
only edits the table. Entries are stored in the type of the activations, or quantized once as they arrive
(`quantforge_kernels.kv`), and attention always reads what is stored.

A layer with a window looks at the last tokens alone. It needs pages for those, and for the tokens that a step writes
before any of them is attended to (``ahead``), however long the sequence is. So it has a ring: page ``p`` of a sequence
lies in page ``p mod n`` of the ``n`` that belong to its row for good, and what is written there takes the place of what
no token will look at again. Where a ring would not be smaller than a whole row, the layer takes pages as others do.
Whoever goes back by more than ``ahead`` tokens has no rings (``ahead`` = 0).

Lengths and tables are tensors on the device, so that a decoding step that was captured as a CUDA
graph finds the place of each new token by itself; the host keeps its own count to refuse what does
not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.cache_kinds import PLAIN, kinds_of
from quantforge.errors import InputError
from quantforge.runtime.memory import check_cache, free_bytes
from quantforge_kernels import kv
from quantforge_kernels.cpu import layer_launchers
from quantforge_kernels.kv import PAGE_SIZE, EncodedKV

Pools = tuple[EncodedKV, EncodedKV]  # the keys, and the values, of one layer
LayerScales = Mapping[int, tuple[Tensor, Tensor]]  # by layer, measured scales of keys and values
PAGED = 0  # the key of the table of layers without a ring; the others have their window for a key


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape and type of the entries that a cache holds for each token.

    Attributes:
        layers: decoder blocks.
        kv_heads: key/value heads.
        head: width of a head.
        kind: see `quantforge.cache_kinds`; "" stores the type of the activations.
        dtype: of the activations.
        windows: of every layer, tokens that it looks at, 0 for all; none given is all.

    Raises:
        UsageError: no such kind.
        InputError: heads of an odd width for ``int4``.
    """

    layers: int
    kv_heads: int
    head: int
    kind: str
    dtype: torch.dtype
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if "int4" in self.kinds and self.head % 2:
            raise InputError(
                f"heads of {self.head} channels cannot be cached in 4 bits", "use int8 or fp8"
            )

    @property
    def kinds(self) -> tuple[str, str]:
        """Return how keys and how values are stored, each one of `quantforge_kernels.kv_row_layout.CACHE_KINDS`."""
        return kinds_of(self.kind or PLAIN)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token, keys and values of all layers."""
        return self.layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of one token in one layer."""
        return sum(
            kv.bytes_per_token(self.kv_heads, self.head, kind, self.dtype) for kind in self.kinds
        )


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Layout of the rows of a cache: which layers take pages as rows grow, and which go in a ring.

    Attributes:
        shape: of the entries.
        tokens: most tokens of a row.
        ahead: most tokens of a row that a step writes; 0: no layer has a ring.
    """

    shape: CacheShape
    tokens: int
    ahead: int = 0

    @property
    def rings(self) -> dict[int, int]:
        """Return the pages of a ring by the window of its layers."""
        whole = -(-self.tokens // PAGE_SIZE)
        # As many tokens as are alive at a time begin anywhere in a page.
        alive = {window: window + self.ahead - 1 for window in {*self.shape.windows} if window}
        found = {window: (tokens - 2) // PAGE_SIZE + 2 for window, tokens in alive.items()}
        return {window: pages for window, pages in found.items() if self.ahead and pages < whole}

    def expect(self, tokens: int) -> None:
        """Make sure that a step of so many tokens of a row leaves in rings what it looks at."""
        assert tokens <= self.ahead or not self.rings

    @property
    def keys(self) -> tuple[int, ...]:
        """Return for each layer its window where it has a ring, else `PAGED`."""
        windows, rings = self.shape.windows or (0,) * self.shape.layers, self.rings
        return tuple(window if window in rings else PAGED for window in windows)

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page of all layers without a ring."""
        return PAGE_SIZE * self.shape.layer_bytes * self.keys.count(PAGED)

    @property
    def ring_bytes(self) -> int:
        """Return the bytes of the rings of one row."""
        pages = sum(pages * self.keys.count(window) for window, pages in self.rings.items())
        return PAGE_SIZE * self.shape.layer_bytes * pages

    def sequence_bytes(self, tokens: int) -> int:
        """Return the bytes that a sequence of so many tokens takes."""
        return self.ring_bytes + self.page_bytes * -(-tokens // PAGE_SIZE)

    def ring_tables(self, rows: int, device: torch.device) -> dict[int, Tensor]:
        """Return by window the pages of every place of a row, ``[rows, most pages]`` int32; they never change."""
        row = torch.arange(rows, device=device)[:, None]
        place = torch.arange(-(-self.tokens // PAGE_SIZE), device=device)
        return {window: (row * pages + place % pages).int() for window, pages in self.rings.items()}

    def stores(self, rows: int, pages: int, device: torch.device) -> list[Pools]:
        """Allocate the keys and values of every layer: ``pages`` for all rows, or their rings."""
        shape, rings = self.shape, self.rings

        def empty(key: int, kind: str) -> EncodedKV:
            count = rows * rings[key] if key else pages
            size = (count, PAGE_SIZE, shape.kv_heads)
            return kv.allocate(size, shape.head, kind, shape.dtype, device)

        keys, values = shape.kinds
        return [(empty(key, keys), empty(key, values)) for key in self.keys]


class CacheRows:
    """Sequences in the pages of a cache, as the model sees them: `PagedCache` owns the pages, `CacheView` borrows them.

    Attributes:
        shape: of the entries.
        layout: of the layers.
        keys: of the layers, see `CacheLayout.keys`.
        layers: keys and values of every layer.
        tables: by key, the page of every place of a row, ``[sequences, most pages]`` int32.
        lengths: tokens of every row, ``[sequences]`` int32.
        sequences: how many rows there are.
        most_tokens: of a row.
    """

    def __init__(
        self,
        layout: CacheLayout,
        layers: list[Pools],
        scales: dict[int, tuple[Tensor | None, Tensor | None]],
        tables: dict[int, Tensor],
        most_tokens: int,
    ) -> None:
        self.layout, self.shape, self.keys = layout, layout.shape, layout.keys
        self.layers, self.tables, self.most_tokens = layers, tables, most_tokens
        self.sequences = len(tables[PAGED])
        self.lengths = tables[PAGED].new_zeros(self.sequences)
        self._scales = (
            scales  # by layer, of keys and values, for every run of channels (`kv.expand_scale`)
        )
        self._counts = [0] * self.sequences  # the lengths, on the host

    @property
    def table(self) -> Tensor:
        """Return the pages of layers without a ring."""
        return self.tables[PAGED]

    def table_of(self, layer: int) -> Tensor:
        """Return the pages of a layer, ``[sequences, most pages]`` int32."""
        return self.tables[self.keys[layer]]

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        return self._counts[sequence]

    def count(self, tokens: int) -> None:
        """Note on the host that every sequence has grown; ``lengths`` is advanced by `Decoder.enter`."""
        for sequence in range(self.sequences):
            self._counts[sequence] += tokens

    def slots(self, tokens: int) -> dict[int, Tensor]:
        """Return the places ``[sequences, tokens]`` of the next tokens of every sequence in the pages, by key."""
        self.layout.expect(tokens)
        new = torch.arange(tokens, device=self.lengths.device)
        at = self.lengths[:, None].long() + new
        return {
            key: table.long().gather(1, at // PAGE_SIZE) * PAGE_SIZE + at % PAGE_SIZE
            for key, table in self.tables.items()
        }

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``[tokens, kv_heads, head]`` at ``slots`` ``[tokens]``."""
        pools, scales = self.layers[layer], self._scales.get(layer, (None, None))
        kinds = pools[0].kind, pools[1].kind
        if layer_launchers.accepts_cache(keys.shape[2], kinds, keys, values):
            layer_launchers.store_kv((keys, values), pools, slots, scales)
            return
        for store, new, scale in zip(pools, (keys, values), scales, strict=True):
            encoded = kv.encode(new, store.kind, scale)
            for pool, part in zip(store.tensors(), encoded.tensors(), strict=True):
                _flat(pool)[slots] = _raw(part)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Read pages ``[sequences, pages]``, decoded: ``[sequences, pages * PAGE_SIZE, kv_heads, head]`` each."""
        table, found = table.long(), []
        for store in self.layers[layer]:
            parts = [_raw(part)[table].view(part.dtype).flatten(1, 2) for part in store.tensors()]
            found.append(kv.decode(EncodedKV(*parts), self.shape.dtype))
        return found[0], found[1]


class PagedCache(CacheRows):
    """Keys and values of some sequences, and the pages that they take as they grow.

    Args:
        shape: of the entries.
        sequences: how many at a time.
        tokens: most tokens of a sequence.
        device: where it lies.
        pages: in all; enough for every sequence to be full when left out.
        scales: by layer, measured scales of keys and values, for a cache in fp8.
        ahead: most tokens of a sequence that are written before they are attended to, if rows are not made
            shorter by more: layers with a window then keep what it holds.

    Attributes:
        pages: in all, of layers without a ring.

    Raises:
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
        assert sequences > 0
        assert tokens > 0
        layout = CacheLayout(shape, tokens, ahead)
        each = -(-tokens // PAGE_SIZE)
        paged = PAGED in layout.keys  # else there is nothing in the pool that could run out
        count = sequences * each if pages is None or not paged else pages
        needed = count * layout.page_bytes + sequences * layout.ring_bytes
        size_of = (sequences, tokens) if pages is None else (1, pages * PAGE_SIZE)
        check_cache(*size_of, shape.token_bytes, needed, free_bytes(device))
        layers = layout.stores(sequences, count, device)
        table = torch.zeros(sequences, each, dtype=torch.int32, device=device)
        tables = {PAGED: table, **layout.ring_tables(sequences, device)}
        super().__init__(layout, layers, _spread(scales or {}, shape, device), tables, tokens)
        self.pages = count
        self._free = list(range(count))[::-1]
        self._held: list[list[int]] = [[] for _ in range(sequences)]

    @property
    def free(self) -> int:
        """Return the number of free pages."""
        return len(self._free)

    def held(self, sequence: int) -> tuple[int, ...]:
        """Return the pages of a sequence, in order."""
        return tuple(self._held[sequence])

    def wanted(self, sequence: int, tokens: int) -> int:
        """Return how many more pages a sequence needs for ``tokens`` tokens in all."""
        return max(0, -(-tokens // PAGE_SIZE) - len(self._held[sequence]))

    def reserve(self, sequence: int, tokens: int) -> None:
        """Make sure that a sequence has pages for ``tokens`` tokens in all.

        Raises:
            InputError: more than a sequence, or the pool, has room for.
        """
        held, wanted = self._held[sequence], self.wanted(sequence, tokens)
        if tokens > self.most_tokens or wanted > self.free:
            room = min(self.most_tokens, PAGE_SIZE * (len(held) + self.free))
            raise InputError(
                f"sequence {sequence} needs a cache of {tokens} tokens, there is room for {room}",
                "shorten the prompt, ask for fewer new tokens, or make the cache larger",
            )
        for _ in range(wanted):
            page = self._free.pop()
            self.table[sequence, len(held)] = page
            held.append(page)

    def shorten(self, sequence: int, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens of a sequence; pages beyond them are free again."""
        held, kept = self._held[sequence], -(-tokens // PAGE_SIZE)
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

    def view(self, sequences: int) -> CacheView:
        """Return so many rows in the pages of this cache."""
        tables = {
            key: table.new_zeros(sequences, table.shape[1]) for key, table in self.tables.items()
        }
        return CacheView(self.layout, self.layers, self._scales, tables, self.most_tokens)

    def copy_rows(self, parents: Sequence[int], same: int) -> None:
        """Make each sequence a copy of another one of the same length; they share no page.

        Args:
            parents: for each sequence, the one to copy.
            same: so many first tokens each has in common with that one.
        """
        assert not self.layout.rings
        rows = [row for row, parent in enumerate(parents) if row != parent]
        pages = slice(same // PAGE_SIZE, -(-max(self._counts) // PAGE_SIZE))
        to = self.table[rows, pages].long()
        source = self.table[[parents[row] for row in rows], pages].long()
        for store in (store for pair in self.layers for store in pair):
            for part in map(_raw, store.tensors()):
                part[to] = part[source]

    def keep_path(self, sequence: int, start: int, nodes: Sequence[int]) -> None:
        """Keep one path of a tree of drafted tokens: move its places to those after ``start``; forget the rest.

        Args:
            sequence: whose last tokens are the tree; it has ``start + len(nodes)`` tokens afterwards.
            start: tokens before the tree.
            nodes: places of the path in the tree, ascending.
        """
        if [*nodes] != [*range(len(nodes))]:
            device = self.lengths.device
            source = torch.tensor(nodes, device=device) + start
            to = torch.arange(start, start + len(nodes), device=device)
            for layer, stores in enumerate(self.layers):
                table = self.table_of(layer)[sequence].long()
                old, new = (
                    table[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in (source, to)
                )
                for flat in (_flat(part) for store in stores for part in store.tensors()):
                    flat[new] = flat[old]
        self.advance(sequence, start + len(nodes) - self.length(sequence))


class CacheView(CacheRows):
    """Rows that show sequences of a `PagedCache`, whose pages they read and write (`PagedCache.view`)."""

    def show(self, cache: PagedCache, sequences: Sequence[int]) -> None:
        """Make the rows these sequences of the cache, in order; the last one again and again where they are too few."""
        more = self.sequences - len(sequences)
        at = torch.tensor([*sequences, *[sequences[-1]] * more], device=self.lengths.device)
        for key, table in self.tables.items():
            table.copy_(cache.tables[key][at])
        self.lengths.copy_(cache.lengths[at])


def _spread(
    scales: LayerScales, shape: CacheShape, device: torch.device
) -> dict[int, tuple[Tensor | None, Tensor | None]]:
    """Return by layer the measured scales for every run; None where keys, or values, are not in fp8."""

    def spread(scale: Tensor, kind: str) -> Tensor | None:
        if kind != "fp8":
            return None
        return kv.expand_scale(scale.to(device), shape.kv_heads, shape.head, kind)

    first, second = shape.kinds
    return {
        layer: (spread(keys, first), spread(values, second))
        for layer, (keys, values) in scales.items()
    }


def _raw(values: Tensor) -> Tensor:
    """View float8 as bytes: torch neither scatters nor gathers it everywhere."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def _flat(pool: Tensor) -> Tensor:
    """View ``[pages, PAGE_SIZE, ...]`` as ``[places, ...]``."""
    return _raw(pool).view(-1, *_raw(pool).shape[2:])
