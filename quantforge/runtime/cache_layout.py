"""Layout of a cache: what it holds for each token, and which layers take pages as their sequences grow or go in a ring.

A layer with a window looks at the last tokens alone. It needs pages for those, and for the tokens that a step writes
before any of them is attended to (``ahead``), however long the sequence is. So it has a ring: page ``p`` of a sequence
lies in page ``p mod n`` of the ``n`` that belong to its row for good, and what is written there takes the place of what
no token will look at again. Where a ring would not be smaller than a whole row, the layer takes pages as others do.

Whoever goes back by more than ``ahead`` tokens has no rings (``ahead`` = 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.architectures.cache_kinds import PLAIN, kinds_of
from quantforge.errors import InputError
from quantforge_kernels import kv
from quantforge_kernels.kv import PAGE, Store


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape and type of the entries that a cache holds for each token.

    Attributes:
        layers: decoder blocks.
        kv_heads: key/value heads.
        head: width of a head.
        kind: see `quantforge.architectures.cache_kinds`; "" stores the type of the activations.
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
        """Return how keys and how values are stored, each one of `quantforge_kernels.kv.KINDS`."""
        return kinds_of(self.kind or PLAIN)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token, keys and values of all layers."""
        return self.layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of one token in one layer."""
        return sum(
            kv.token_bytes(self.kv_heads, self.head, kind, self.dtype) for kind in self.kinds
        )


PAGED = 0  # the key of the table of layers without a ring; the others have their window for a key


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Layout of the rows of a cache.

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
        whole = -(-self.tokens // PAGE)
        # As many tokens as are alive at a time begin anywhere in a page.
        alive = {window: window + self.ahead - 1 for window in {*self.shape.windows} if window}
        found = {window: (tokens - 2) // PAGE + 2 for window, tokens in alive.items()}
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
        return PAGE * self.shape.layer_bytes * self.keys.count(PAGED)

    @property
    def ring_bytes(self) -> int:
        """Return the bytes of the rings of one row."""
        pages = sum(pages * self.keys.count(window) for window, pages in self.rings.items())
        return PAGE * self.shape.layer_bytes * pages

    def sequence_bytes(self, tokens: int) -> int:
        """Return the bytes that a sequence of so many tokens takes."""
        return self.ring_bytes + self.page_bytes * -(-tokens // PAGE)

    def ring_tables(self, rows: int, device: torch.device) -> dict[int, Tensor]:
        """Return by window the pages of every place of a row, ``[rows, most pages]`` int32; they never change."""
        row = torch.arange(rows, device=device)[:, None]
        place = torch.arange(-(-self.tokens // PAGE), device=device)
        return {window: (row * pages + place % pages).int() for window, pages in self.rings.items()}

    def stores(self, rows: int, pages: int, device: torch.device) -> list[tuple[Store, Store]]:
        """Allocate the keys and values of every layer: ``pages`` for all rows, or their rings."""
        shape, rings = self.shape, self.rings

        def empty(key: int, kind: str) -> Store:
            count = rows * rings[key] if key else pages
            size = (count, PAGE, shape.kv_heads)
            return kv.empty(size, shape.head, kind, shape.dtype, device)

        keys, values = shape.kinds
        return [(empty(key, keys), empty(key, values)) for key in self.keys]
