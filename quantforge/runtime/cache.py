"""The paged cache of keys and values: fixed pages, a table per sequence, a list of free pages.

Token ``t`` of sequence ``s`` lies in page ``table[s, t // PAGE]`` at place ``t % PAGE``, in every
layer. Sequences of any length share one pool and waste less than a page each; sharing a prefix or
evicting a sequence only edits the table. Entries are stored in the type of the activations, or
quantized once as they arrive (`quantforge_kernels.kv`), and attention always reads what is stored.

Lengths and table are tensors on the device, so that a decoding step that was captured as a CUDA
graph finds the place of each new token by itself; the host keeps its own count to refuse what does
not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.errors import InputError, UsageError, nearest
from quantforge.runtime.room import check_cache, free_bytes
from quantforge_kernels import kv
from quantforge_kernels.cpu import layer_launchers
from quantforge_kernels.kv import PAGE, Store

LayerScales = Mapping[int, tuple[Tensor, Tensor]]  # by layer, measured scales of keys and values


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape and type of the entries that a cache holds for each token.

    Attributes:
        layers: decoder blocks.
        kv_heads: key/value heads.
        head: width of a head.
        kind: one of `quantforge_kernels.kv.KINDS`; "" stores the type of the activations.
        dtype: of the activations.

    Raises:
        UsageError: no such kind.
        InputError: heads of an odd width for ``int4``.
    """

    layers: int
    kv_heads: int
    head: int
    kind: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.kind not in kv.KINDS:
            raise UsageError(f"no such kind of cache: {self.kind!r}", nearest(self.kind, kv.KINDS))
        if self.kind == "int4" and self.head % 2:
            raise InputError(
                f"heads of {self.head} channels cannot be cached in 4 bits", "use int8 or fp8"
            )

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token, keys and values of all layers."""
        return 2 * self.layers * kv.token_bytes(self.kv_heads, self.head, self.kind, self.dtype)


class PagedCache:
    """Keys and values of some sequences.

    Args:
        shape: of the entries.
        sequences: how many at a time.
        tokens: most tokens of a sequence.
        device: where it lies.
        pages: in all; enough for every sequence to be full when left out.
        scales: by layer, measured scales of keys and values, for a cache in fp8.

    Raises:
        InputError: no sequence, or no token.
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
        if sequences < 1 or tokens < 1:
            raise InputError(
                f"a cache of {sequences} sequences of {tokens} tokens", "at least one of each"
            )
        check_cache(shape, sequences, tokens, free_bytes(device))
        self.shape = shape

        def spread(scale: Tensor) -> Tensor:
            return kv.spread(scale.to(device), shape.kv_heads, shape.head, "fp8")

        self._scales = {
            layer: (spread(keys), spread(values))
            for layer, (keys, values) in (scales or {}).items()
            if shape.kind == "fp8"
        }
        self.most_tokens = tokens
        each = -(-tokens // PAGE)
        count = sequences * each if pages is None else pages
        size = (count, PAGE, shape.kv_heads)
        self.layers: list[tuple[Store, Store]] = [
            (
                kv.empty(size, shape.head, shape.kind, shape.dtype, device),
                kv.empty(size, shape.head, shape.kind, shape.dtype, device),
            )
            for _ in range(shape.layers)
        ]
        self.table = torch.zeros(sequences, each, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._free = list(range(count))[::-1]
        self._held: list[list[int]] = [[] for _ in range(sequences)]
        self._counts = [0] * sequences

    @property
    def sequences(self) -> int:
        """Return the number of sequences that it has room for."""
        return len(self._held)

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        return self._counts[sequence]

    def reserve(self, sequence: int, tokens: int) -> None:
        """Make sure that a sequence has pages for ``tokens`` tokens in all.

        Raises:
            InputError: more than a sequence, or the pool, has room for.
        """
        wanted = -(-tokens // PAGE) - len(self._held[sequence])
        if tokens > self.most_tokens or wanted > len(self._free):
            room = min(self.most_tokens, PAGE * (len(self._held[sequence]) + len(self._free)))
            raise InputError(
                f"sequence {sequence} needs a cache of {tokens} tokens, there is room for {room}",
                "shorten the prompt, ask for fewer new tokens, or make the cache larger",
            )
        for _ in range(wanted):
            page = self._free.pop()
            self.table[sequence, len(self._held[sequence])] = page
            self._held[sequence].append(page)

    def release(self, sequence: int) -> None:
        """Forget a sequence; its pages are free again."""
        self._free.extend(reversed(self._held[sequence]))
        self._held[sequence] = []
        self._counts[sequence] = 0
        self.lengths[sequence] = 0

    def truncate(self, sequence: int, tokens: int) -> None:
        """Forget what a sequence holds beyond ``tokens`` tokens; its pages stay reserved."""
        self._counts[sequence] = min(tokens, self._counts[sequence])
        self.lengths[sequence] = self._counts[sequence]

    def spread(self, sequence: int, rows: int) -> PagedCache:
        """Return a view in which ``rows`` sequences share the pages of one, and each has a length of its own.

        With lengths n, n+1, ... the next ``rows`` tokens of the sequence are computed as if each belonged to another
        one: all are written before any is attended to, and each sees those before it.
        """
        view = copy(self)
        view.table = self.table[sequence].repeat(rows, 1)
        view.lengths = self.lengths[sequence].repeat(rows)
        view._held = [self._held[sequence]] * rows
        view._counts = [self._counts[sequence]] * rows
        return view

    def slots(self, tokens: int) -> Tensor:
        """Return the places ``[sequences, tokens]`` of the next tokens of every sequence, in the pool of pages."""
        new = torch.arange(tokens, device=self.lengths.device)
        at = self.lengths[:, None].long() + new
        return self.table.long().gather(1, at // PAGE) * PAGE + at % PAGE

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``[tokens, kv_heads, head]`` at ``slots`` ``[tokens]``."""
        pools, scales, kind = self.layers[layer], self._scales.get(layer), self.shape.kind
        if layer_launchers.accepts_cache(self.shape.head, kind, keys, values):
            layer_launchers.store((keys, values), pools, kind, slots, scales)
            return
        for store, given, scale in zip(pools, (keys, values), scales or (None, None), strict=True):
            encoded = kv.encode(given, kind, scale)
            for pool, part in zip(store.each(), encoded.each(), strict=True):
                _bytes(pool).view(-1, *_bytes(pool).shape[2:])[slots] = _bytes(part)

    def read(self, layer: int, pages: int) -> tuple[Tensor, Tensor]:
        """Read the first pages of every sequence, decoded: ``[sequences, pages * PAGE, kv_heads, head]`` each."""
        table = self.table[:, :pages].long()
        found = []
        for store in self.layers[layer]:
            parts = [_bytes(part)[table].view(part.dtype).flatten(1, 2) for part in store.each()]
            found.append(kv.decode(Store(*parts), self.shape.kind, self.shape.dtype))
        return found[0], found[1]

    def count(self, tokens: int) -> None:
        """Note on the host that every sequence has grown; ``lengths`` is advanced by `Decoder.enter`."""
        for sequence in range(self.sequences):
            self._counts[sequence] += tokens


def _bytes(values: Tensor) -> Tensor:
    """View float8 as bytes: torch neither scatters nor gathers it everywhere."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values
