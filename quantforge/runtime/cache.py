"""The paged cache of keys and values: fixed pages, a table per sequence, a list of free pages.

Token ``t`` of sequence ``s`` lies in page ``table[s, t // PAGE]`` at place ``t % PAGE``, in every
layer. Sequences of any length share one pool and waste less than a page each; sharing a prefix or
evicting a sequence only edits the table, and a shared page (`page_pool`) is copied before it is
written. Entries are stored in the type of the activations, or quantized once as they arrive
(`quantforge_kernels.kv`), and attention always reads what is stored.

Lengths and table are tensors on the device, so that a decoding step that was captured as a CUDA
graph finds the place of each new token by itself; the host keeps its own count to refuse what does
not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.runtime.cache_shape import CacheShape
from quantforge.runtime.page_pool import PagePool
from quantforge.runtime.room import check_cache, free_bytes
from quantforge_kernels import kv
from quantforge_kernels.cpu import layer_launchers
from quantforge_kernels.kv import PAGE, Store

LayerScales = Mapping[int, tuple[Tensor, Tensor]]  # by layer, measured scales of keys and values


class PagedCache:
    """Keys and values of some sequences.

    Args:
        shape: of the entries.
        sequences: how many at a time.
        tokens: most tokens of a sequence.
        device: where it lies.
        pages: in all; enough for every sequence to be full when left out.
        scales: by layer, measured scales of keys and values, for a cache in fp8.

    Attributes:
        pool: its pages.

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
    ) -> None:
        if sequences < 1 or tokens < 1 or (pages is not None and pages < 1):
            of = "" if pages is None else f" in {pages} pages"
            raise InputError(
                f"a cache of {sequences} sequences of {tokens} tokens{of}", "at least one of each"
            )
        size_of = (sequences, tokens) if pages is None else (1, pages * PAGE)
        check_cache(shape, *size_of, free_bytes(device))
        self.shape = shape

        def spread(scale: Tensor) -> Tensor:
            return kv.spread(scale.to(device), shape.kv_heads, shape.head, "fp8")

        kinds = shape.kinds
        self._scales = {
            layer: tuple(
                spread(scale) if kind == "fp8" else None
                for kind, scale in zip(kinds, both, strict=True)
            )
            for layer, both in (scales or {}).items()
        }
        self.most_tokens = tokens
        each = -(-tokens // PAGE)
        count = sequences * each if pages is None else pages
        size = (count, PAGE, shape.kv_heads)
        self.layers: list[tuple[Store, Store]] = [
            (
                kv.empty(size, shape.head, kinds[0], shape.dtype, device),
                kv.empty(size, shape.head, kinds[1], shape.dtype, device),
            )
            for _ in range(shape.layers)
        ]
        self.table = torch.zeros(sequences, each, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.pool = PagePool(count)
        self._held: list[list[int]] = [[] for _ in range(sequences)]
        self._counts = [0] * sequences

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
        if tokens > self.most_tokens or wanted > self.pool.free:
            room = min(self.most_tokens, PAGE * (len(held) + self.pool.free))
            raise InputError(
                f"sequence {sequence} needs a cache of {tokens} tokens, there is room for {room}",
                "shorten the prompt, ask for fewer new tokens, or make the cache larger",
            )
        for _ in range(wanted):
            self._append(sequence, self.pool.take())

    def _append(self, sequence: int, page: int) -> None:
        self.table[sequence, len(self._held[sequence])] = page
        self._held[sequence].append(page)

    def adopt(self, sequence: int, pages: Sequence[int], tokens: int) -> None:
        """Begin an empty sequence with ``tokens`` tokens of others: share full pages, copy one partly used.

        Args:
            sequence: to begin.
            pages: where those tokens lie; each is held by another sequence, or kept in the pool.
            tokens: at most as many as the pages have.

        Raises:
            InputError: a copy is needed, and no page is free; the sequence is then still empty.
        """
        assert not self._held[sequence]
        whole, rest = divmod(tokens, PAGE)
        used = [self.pool.hold(page) for page in pages[: -(-tokens // PAGE)]]
        if rest and not self.pool.free:
            for page in used[::-1]:
                self.pool.drop(page)
            raise InputError(
                f"no page is free for a copy for sequence {sequence}", "free a page before"
            )
        for page in used[:whole]:
            self._append(sequence, page)
        if rest:
            self._append(sequence, self._copy(used[whole]))
            self.pool.drop(used[whole])
        self.advance(sequence, tokens)

    def shorten(self, sequence: int, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens of a sequence; pages beyond them are let go.

        Raises:
            InputError: the last page left is partly used and shared, and no page is free for a copy of it.
        """
        held, kept = self._held[sequence], -(-tokens // PAGE)
        assert tokens <= self._counts[sequence]
        while len(held) > kept:
            self.pool.drop(held.pop())
        if tokens % PAGE and self.pool.holders(held[-1]) == 1:  # it will be written
            self.pool.change(held[-1])
        elif tokens % PAGE:
            if not self.pool.free:
                raise InputError(
                    f"no page is free for a copy for sequence {sequence}", "free a page before"
                )
            shared = held.pop()
            self._append(sequence, self._copy(shared))
            self.pool.drop(shared)
        self.advance(sequence, tokens - self._counts[sequence])

    def release(self, sequence: int) -> None:
        """Forget a sequence; pages that nobody else holds are free again."""
        self.shorten(sequence, 0)

    def advance(self, sequence: int, tokens: int) -> None:
        """Note, on the host and on the device, that one sequence has so many tokens more."""
        self._counts[sequence] += tokens
        self.lengths[sequence] = self._counts[sequence]

    def _copy(self, page: int) -> int:
        """Return a new page with the contents of another."""
        taken = self.pool.take()
        for store in (store for pair in self.layers for store in pair):
            for part in store.each():
                raw_bytes(part)[taken] = raw_bytes(part)[page]
        return taken

    def follow(self, sequences: Sequence[int]) -> None:
        """Note that each of some sequences has a token more; as `advance`, for all at once."""
        for sequence in sequences:
            self._counts[sequence] += 1
        self.lengths[torch.tensor(sequences, device=self.lengths.device)] += 1

    def slots(self, tokens: int) -> Tensor:
        """Return the places ``[sequences, tokens]`` of the next tokens of every sequence, in the pool of pages."""
        new = torch.arange(tokens, device=self.lengths.device)
        at = self.lengths[:, None].long() + new
        return self.table.long().gather(1, at // PAGE) * PAGE + at % PAGE

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``[tokens, kv_heads, head]`` at ``slots`` ``[tokens]``."""
        pools, scales = self.layers[layer], self._scales.get(layer, (None, None))
        if layer_launchers.accepts_cache(self.shape.head, self.shape.kinds, keys, values):
            layer_launchers.store((keys, values), pools, slots, (scales[0], scales[1]))
            return
        for store, given, scale in zip(pools, (keys, values), scales, strict=True):
            encoded = kv.encode(given, store.kind, scale)
            for pool, part in zip(store.each(), encoded.each(), strict=True):
                raw_bytes(pool).view(-1, *raw_bytes(pool).shape[2:])[slots] = raw_bytes(part)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Read pages ``[sequences, pages]``, decoded: ``[sequences, pages * PAGE, kv_heads, head]`` each."""
        table, found = table.long(), []
        for store in self.layers[layer]:
            parts = [raw_bytes(part)[table].view(part.dtype).flatten(1, 2) for part in store.each()]
            found.append(kv.decode(Store(*parts), self.shape.dtype))
        return found[0], found[1]

    def count(self, tokens: int) -> None:
        """Note on the host that every sequence has grown; ``lengths`` is advanced by `Decoder.enter`."""
        for sequence in range(self.sequences):
            self._counts[sequence] += tokens


def raw_bytes(values: Tensor) -> Tensor:
    """View float8 as bytes: torch neither scatters nor gathers it everywhere."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values
