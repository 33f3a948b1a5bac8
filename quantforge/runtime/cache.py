"""The paged KV cache: fixed-size pages, a page table per sequence, a list of free pages.

Token ``t`` of sequence ``s`` is stored in page ``table[s, t // PAGE]`` at offset ``t % PAGE``, in every layer.
Sequences of any length share one pool and waste less than a page each; evicting a sequence only edits the table.
Entries are stored in the type of the activations, or quantized once as they arrive (`quantforge_kernels.kv`), and
attention always reads the stored values.

A layer with sliding-window attention reads the last tokens only. However long the sequence is, it needs pages for the
window and for the tokens that one step writes before attention runs (``max_step_tokens``). So it uses a ring buffer:
page ``p`` of a sequence is page ``p mod n`` of the ``n`` pages that belong to its row permanently; new entries
overwrite those that are outside every window. If a ring would not be smaller than a whole row, the layer uses ordinary
pages. Rings are disabled (``max_step_tokens`` = 0) where sequences may be truncated by more tokens than that.

Lengths and tables are tensors on the device, so that a decoding step captured as a CUDA graph can compute the slots of
new tokens itself; the host keeps its own counts to check the capacity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.cache_kinds import PLAIN, parse_cache_kind
from quantforge.errors import InputError
from quantforge.runtime.memory import check_cache_fits, free_bytes
from quantforge_kernels import kv
from quantforge_kernels.cpu import layer_launchers
from quantforge_kernels.kv import PAGE_SIZE, EncodedKV

Pools = tuple[EncodedKV, EncodedKV]  # the keys, and the values, of one layer
LayerScales = Mapping[int, tuple[Tensor, Tensor]]  # calibrated scales of keys and values, by layer
PAGED = 0  # key of the page table of layers without a ring; those with a ring use their window size


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape and type of the cache entries of one token.

    Attributes:
        layers: number of decoder blocks.
        kv_heads: number of key/value heads.
        head: head dimension.
        kind: cache kind, see `quantforge.cache_kinds`; "" for the type of the activations.
        dtype: type of the activations.
        windows: sliding-window size of every layer, 0 for full attention; empty if no layer has a window.

    Raises:
        UsageError: the kind is unknown.
        InputError: the head dimension is odd, which ``int4`` does not support.
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
        """Return the storage kinds of keys and values, from `quantforge_kernels.kv_row_layout.CACHE_KINDS`."""
        return parse_cache_kind(self.kind or PLAIN)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token: keys and values of all layers."""
        return self.layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of one token in one layer."""
        return sum(
            kv.bytes_per_token(self.kv_heads, self.head, kind, self.dtype) for kind in self.kinds
        )


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Layout of a cache: which layers allocate pages as sequences grow, and which use a ring of pages.

    Attributes:
        shape: shape and type of the entries.
        tokens: most tokens of a sequence.
        max_step_tokens: most tokens of a sequence that one step writes; 0 disables rings.
    """

    shape: CacheShape
    tokens: int
    max_step_tokens: int = 0

    @property
    def rings(self) -> dict[int, int]:
        """Return the number of pages of a ring, by the window size of its layers."""
        row_pages = -(-self.tokens // PAGE_SIZE)
        # The tokens that must be kept at a time may begin anywhere in a page.
        live_tokens = {
            window: window + self.max_step_tokens - 1 for window in {*self.shape.windows} if window
        }
        ring_pages = {
            window: (tokens - 2) // PAGE_SIZE + 2 for window, tokens in live_tokens.items()
        }
        return {
            window: pages
            for window, pages in ring_pages.items()
            if self.max_step_tokens and pages < row_pages
        }

    def check_step_size(self, tokens: int) -> None:
        """Assert that a step of ``tokens`` tokens per sequence does not overwrite ring entries that it reads."""
        assert tokens <= self.max_step_tokens or not self.rings

    @property
    def table_keys(self) -> tuple[int, ...]:
        """Return the page table key of each layer: its window size if it has a ring, else `PAGED`."""
        windows, rings = self.shape.windows or (0,) * self.shape.layers, self.rings
        return tuple(window if window in rings else PAGED for window in windows)

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page in all layers without a ring."""
        return PAGE_SIZE * self.shape.layer_bytes * self.table_keys.count(PAGED)

    @property
    def ring_bytes(self) -> int:
        """Return the bytes of the rings of one row."""
        pages = sum(pages * self.table_keys.count(window) for window, pages in self.rings.items())
        return PAGE_SIZE * self.shape.layer_bytes * pages

    def sequence_bytes(self, tokens: int) -> int:
        """Return the bytes of a sequence of ``tokens`` tokens."""
        return self.ring_bytes + self.page_bytes * -(-tokens // PAGE_SIZE)

    def ring_tables(self, rows: int, device: torch.device) -> dict[int, Tensor]:
        """Return the constant page tables ``[rows, max pages]`` (int32) of rings, by window size."""
        row = torch.arange(rows, device=device)[:, None]
        page_index = torch.arange(-(-self.tokens // PAGE_SIZE), device=device)
        return {
            window: (row * pages + page_index % pages).int() for window, pages in self.rings.items()
        }

    def stores(self, rows: int, pages: int, device: torch.device) -> list[Pools]:
        """Allocate the key and value storage of every layer: a pool of ``pages`` pages, or the rings of all rows."""
        shape, rings = self.shape, self.rings

        def empty(key: int, kind: str) -> EncodedKV:
            count = rows * rings[key] if key else pages
            size = (count, PAGE_SIZE, shape.kv_heads)
            return kv.allocate(size, shape.head, kind, shape.dtype, device)

        key_kind, value_kind = shape.kinds
        return [(empty(key, key_kind), empty(key, value_kind)) for key in self.table_keys]


class CacheRows:
    """Base class of caches as the model uses them: `PagedCache` owns the pages, `CacheView` refers to them.

    Attributes:
        shape: shape and type of the entries.
        layout: layout of the layers.
        table_keys: page table key of each layer, see `CacheLayout.table_keys`.
        layers: key and value storage of every layer.
        tables: page tables by key, ``[sequences, max pages]`` int32.
        lengths: number of tokens of every sequence, ``[sequences]`` int32.
        sequences: number of sequences (rows).
        max_tokens: most tokens of a sequence.
    """

    def __init__(
        self,
        layout: CacheLayout,
        layers: list[Pools],
        scales: dict[int, tuple[Tensor | None, Tensor | None]],
        tables: dict[int, Tensor],
        max_tokens: int,
    ) -> None:
        self.layout, self.shape, self.table_keys = layout, layout.shape, layout.table_keys
        self.layers, self.tables, self.max_tokens = layers, tables, max_tokens
        self.sequences = len(tables[PAGED])
        self.lengths = tables[PAGED].new_zeros(self.sequences)
        self._scales = scales  # of keys and values by layer, expanded by `kv.expand_scale`
        self._counts = [0] * self.sequences  # the lengths, on the host

    @property
    def table(self) -> Tensor:
        """Return the page table of layers without a ring."""
        return self.tables[PAGED]

    def table_of(self, layer: int) -> Tensor:
        """Return the page table of a layer, ``[sequences, max pages]`` int32."""
        return self.tables[self.table_keys[layer]]

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        return self._counts[sequence]

    def advance_all(self, tokens: int) -> None:
        """Add ``tokens`` to the host's token counts; `Decoder.prepare_inputs` advances ``lengths`` on the device."""
        for sequence in range(self.sequences):
            self._counts[sequence] += tokens

    def slots(self, tokens: int) -> dict[int, Tensor]:
        """Return the slots ``[sequences, tokens]`` of the next tokens of every sequence, by page table key."""
        self.layout.check_step_size(tokens)
        offsets = torch.arange(tokens, device=self.lengths.device)
        positions = self.lengths[:, None].long() + offsets
        return {
            key: table.long().gather(1, positions // PAGE_SIZE) * PAGE_SIZE + positions % PAGE_SIZE
            for key, table in self.tables.items()
        }

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values ``[tokens, kv_heads, head]`` at ``slots`` ``[tokens]``."""
        pools, scales = self.layers[layer], self._scales.get(layer, (None, None))
        kinds = pools[0].kind, pools[1].kind
        if layer_launchers.accepts_cache(keys.shape[2], kinds, keys, values):
            layer_launchers.store_kv((keys, values), pools, slots, scales)
            return
        for store, tensor, scale in zip(pools, (keys, values), scales, strict=True):
            encoded = kv.encode(tensor, store.kind, scale)
            for pool, encoded_part in zip(store.tensors(), encoded.tensors(), strict=True):
                _as_slots(pool)[slots] = _as_bytes(encoded_part)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Read and dequantize the pages ``[sequences, pages]`` of a layer.

        Returns:
            Keys and values, ``[sequences, pages * PAGE, kv_heads, head]`` each.
        """
        table, decoded = table.long(), []
        for store in self.layers[layer]:
            page_tensors = [
                _as_bytes(page_tensor)[table].view(page_tensor.dtype).flatten(1, 2)
                for page_tensor in store.tensors()
            ]
            decoded.append(kv.decode(EncodedKV(*page_tensors), self.shape.dtype))
        return decoded[0], decoded[1]


class PagedCache(CacheRows):
    """KV cache of several sequences that allocates pages as they grow.

    Args:
        shape: shape and type of the entries.
        sequences: most sequences at a time.
        tokens: most tokens of a sequence.
        device: device of the cache.
        pages: total number of pages; by default enough for all sequences at full length.
        scales: calibrated scales of keys and values by layer, for fp8 caches.
        max_step_tokens: most tokens of a sequence that one step writes, if sequences are never truncated by more;
            this lets layers with a sliding window use rings. 0 disables rings.

    Attributes:
        pages: total number of pages of layers without a ring.

    Raises:
        ResourceError: the cache does not fit into GPU memory.
    """

    def __init__(
        self,
        shape: CacheShape,
        sequences: int,
        tokens: int,
        device: torch.device,
        pages: int | None = None,
        scales: LayerScales | None = None,
        max_step_tokens: int = 0,
    ) -> None:
        assert sequences > 0
        assert tokens > 0
        layout = CacheLayout(shape, tokens, max_step_tokens)
        pages_per_sequence = -(-tokens // PAGE_SIZE)
        # Else there is nothing in the pool that could run out
        uses_pool = PAGED in layout.table_keys
        count = sequences * pages_per_sequence if pages is None or not uses_pool else pages
        needed = count * layout.page_bytes + sequences * layout.ring_bytes
        sequences_and_tokens = (sequences, tokens) if pages is None else (1, pages * PAGE_SIZE)
        check_cache_fits(*sequences_and_tokens, shape.token_bytes, needed, free_bytes(device))
        layers = layout.stores(sequences, count, device)
        table = torch.zeros(sequences, pages_per_sequence, dtype=torch.int32, device=device)
        tables = {PAGED: table, **layout.ring_tables(sequences, device)}
        super().__init__(
            layout, layers, _expand_scales(scales or {}, shape, device), tables, tokens
        )
        self.pages = count
        self._free_pages = list(range(count))[::-1]
        self._pages_of: list[list[int]] = [[] for _ in range(sequences)]

    @property
    def free_pages(self) -> int:
        """Return the number of free pages."""
        return len(self._free_pages)

    def pages_of(self, sequence: int) -> tuple[int, ...]:
        """Return the pages of a sequence, in order."""
        return tuple(self._pages_of[sequence])

    def pages_needed(self, sequence: int, tokens: int) -> int:
        """Return how many more pages a sequence needs for ``tokens`` tokens in total."""
        return max(0, -(-tokens // PAGE_SIZE) - len(self._pages_of[sequence]))

    def reserve(self, sequence: int, tokens: int) -> None:
        """Allocate pages so that a sequence has room for ``tokens`` tokens in total.

        Raises:
            InputError: the limit of a sequence or the number of free pages is exceeded.
        """
        pages, needed = self._pages_of[sequence], self.pages_needed(sequence, tokens)
        if tokens > self.max_tokens or needed > self.free_pages:
            capacity = min(self.max_tokens, PAGE_SIZE * (len(pages) + self.free_pages))
            raise InputError(
                f"sequence {sequence} needs a cache of {tokens} tokens, there is room for {capacity}",
                "shorten the prompt, ask for fewer new tokens, or make the cache larger",
            )
        for _ in range(needed):
            page = self._free_pages.pop()
            self.table[sequence, len(pages)] = page
            pages.append(page)

    def truncate_sequence(self, sequence: int, tokens: int) -> None:
        """Truncate a sequence to its first ``tokens`` tokens and free the pages after them."""
        pages, needed_pages = self._pages_of[sequence], -(-tokens // PAGE_SIZE)
        assert tokens <= self._counts[sequence]
        while len(pages) > needed_pages:
            self._free_pages.append(pages.pop())
        self.advance(sequence, tokens - self._counts[sequence])

    def release(self, sequence: int) -> None:
        """Remove all tokens of a sequence and free its pages."""
        self.truncate_sequence(sequence, 0)

    def advance(self, sequence: int, tokens: int) -> None:
        """Add ``tokens`` to the length of one sequence, on the host and on the device."""
        self._counts[sequence] += tokens
        self.lengths[sequence] = self._counts[sequence]

    def append_one_each(self, sequences: Sequence[int]) -> None:
        """Add one token to the length of each of the given sequences, on the host and on the device."""
        for sequence in sequences:
            self._counts[sequence] += 1
        self.lengths[torch.tensor(sequences, device=self.lengths.device)] += 1

    def view(self, sequences: int) -> CacheView:
        """Create a view with ``sequences`` rows over the pages of this cache."""
        tables = {
            key: table.new_zeros(sequences, table.shape[1]) for key, table in self.tables.items()
        }
        return CacheView(self.layout, self.layers, self._scales, tables, self.max_tokens)

    def copy_rows(self, parents: Sequence[int], shared_tokens: int) -> None:
        """Replace the entries of each sequence with a copy of its parent's, which has the same length.

        Args:
            parents: for each sequence, the index of the sequence to copy.
            shared_tokens: number of leading tokens that all sequences share, which are not copied.
        """
        assert not self.layout.rings
        rows = [row for row, parent in enumerate(parents) if row != parent]
        pages = slice(shared_tokens // PAGE_SIZE, -(-max(self._counts) // PAGE_SIZE))
        target_pages = self.table[rows, pages].long()
        source = self.table[[parents[row] for row in rows], pages].long()
        for store in (store for pair in self.layers for store in pair):
            for raw_tensor in map(_as_bytes, store.tensors()):
                raw_tensor[target_pages] = raw_tensor[source]

    def keep_tree_path(self, sequence: int, start: int, nodes: Sequence[int]) -> None:
        """Keep one path of a draft tree: move its entries to the slots after ``start`` and drop the rest of the tree.

        Args:
            sequence: the sequence that ends with the tree; its length becomes ``start + len(nodes)``.
            start: number of tokens before the tree.
            nodes: indices of the path's nodes in the tree, ascending.
        """
        if [*nodes] != [*range(len(nodes))]:
            device = self.lengths.device
            source = torch.tensor(nodes, device=device) + start
            target_slots = torch.arange(start, start + len(nodes), device=device)
            for layer, stores in enumerate(self.layers):
                table = self.table_of(layer)[sequence].long()
                old_slots, new_slots = (
                    table[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
                    for positions in (source, target_slots)
                )
                for flat in (_as_slots(tensor) for store in stores for tensor in store.tensors()):
                    flat[new_slots] = flat[old_slots]
        self.advance(sequence, start + len(nodes) - self.length(sequence))


class CacheView(CacheRows):
    """A view of selected sequences of a `PagedCache`, reading and writing its pages (`PagedCache.view`)."""

    def select(self, cache: PagedCache, sequences: Sequence[int]) -> None:
        """Select the sequences that the rows refer to; remaining rows repeat the last sequence."""
        num_padding = self.sequences - len(sequences)
        indices = torch.tensor(
            [*sequences, *[sequences[-1]] * num_padding], device=self.lengths.device
        )
        for key, table in self.tables.items():
            table.copy_(cache.tables[key][indices])
        self.lengths.copy_(cache.lengths[indices])


def _expand_scales(
    scales: LayerScales, shape: CacheShape, device: torch.device
) -> dict[int, tuple[Tensor | None, Tensor | None]]:
    """Return the calibrated scales by layer, expanded for the kernels; None for keys or values that are not in fp8."""

    def expand(scale: Tensor, kind: str) -> Tensor | None:
        if kind != "fp8":
            return None
        return kv.expand_scale(scale.to(device), shape.kv_heads, shape.head, kind)

    key_kind, value_kind = shape.kinds
    return {
        layer: (expand(keys, key_kind), expand(values, value_kind))
        for layer, (keys, values) in scales.items()
    }


def _as_bytes(values: Tensor) -> Tensor:
    """View float8 values as bytes, because torch does not support scatter and gather of float8 on all devices."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def _as_slots(pool: Tensor) -> Tensor:
    """View pages ``[pages, PAGE, ...]`` as slots ``[slots, ...]``."""
    return _as_bytes(pool).view(-1, *_as_bytes(pool).shape[2:])
