"""A ragged batch: spans of new tokens of some sequences, of different lengths, side by side as one list of tokens.

What works on single tokens (products, norms, rotary) sees the list. Attention sees two groups. Every token of a short
span is attended from as if it were the newest of its sequence, by the program that decodes: what lies behind it is
beyond the length it is given. So a verified draft has the very numbers that it would have had one by one. A long span,
or one whose tokens are a tree, is computed at once over the pages of its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.runtime.cache import PagedCache
from quantforge.runtime.prompt_attention import attend_span, depths, pages_before
from quantforge_kernels.attention import Scores, attend
from quantforge_kernels.kv import PAGE

Taps = dict[int, Tensor | None] | None  # what goes into some blocks, by their numbers
SHORT = 8  # most tokens of a span that are attended from one by one


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence.

    Attributes:
        row: of the cache's table.
        tokens: their number, at least 1.
        tree: ``[n, n]`` bool, which tokens of a tree each one sees, itself among them; None: all before it. These are
            the last of its n tokens, those before them are in the cache. Places there follow the order of the tokens,
            positions follow their depth.
    """

    row: int
    tokens: int
    tree: Tensor | None = None


class RaggedBatch:
    """Places of the tokens of spans, and their attention.

    Args:
        spans: of different rows of the cache; at least one.
        cache: holds what came before; pages for the new tokens are reserved.
        taps: to be filled, see `Decoder.hidden_of`.

    Attributes:
        slots: places ``[tokens]`` in the pages, by key of a layer (`CacheLayout.keys`).
        positions: of the tokens in their sequences, ``[tokens]``.
        taps: as given.
    """

    def __init__(self, spans: Sequence[Span], cache: PagedCache, taps: Taps = None) -> None:
        self.taps = taps
        device = cache.table.device
        cache.layout.expect(max(span.tokens for span in spans))
        starts = [cache.length(span.row) for span in spans]
        given = torch.tensor(
            [(span.row, start, span.tokens) for span, start in zip(spans, starts, strict=True)]
        )
        rows, begin, _ = given.repeat_interleave(given[:, 2], 0).unbind(1)
        ends = given[:, 2].cumsum(0)
        first = (ends - given[:, 2]).repeat_interleave(given[:, 2])
        within = torch.arange(len(rows)) - first
        rows, places = rows.to(device), (begin + within).to(device)
        self.slots = {
            key: table[rows, places // PAGE].long() * PAGE + places % PAGE
            for key, table in cache.tables.items()
        }
        self.positions = places
        self._long: list[tuple[slice, Span, int]] = []
        short = torch.ones(len(rows), dtype=torch.bool)
        for span, start, end in zip(spans, starts, ends.tolist(), strict=True):
            if span.tokens > SHORT or span.tree is not None:
                part = slice(end - span.tokens, end)
                short[part] = False
                self._long.append((part, span, start + span.tokens))
                if span.tree is not None:
                    self.positions = self.positions.clone()
                    begun = start + span.tokens - len(span.tree)
                    self.positions[part] = begun + depths(span.tree.to(device))[-span.tokens :]
        self._short = short.nonzero()[:, 0].to(device)
        if self._long:
            rows, places = rows[self._short], places[self._short]
        pages = int(((begin + within)[short]).max()) // PAGE + 1 if len(places) else 0
        self._tables = {key: table[rows, :pages] for key, table in cache.tables.items()}
        self._lengths = (places + 1).int()

    def attend(self, q: Tensor, layer: int, cache: PagedCache, scores: Scores) -> Tensor:
        """Return attention ``[tokens, heads, head]`` of queries of that shape, whose keys and values are stored."""
        if not self._long:
            return self._attend_short(q, layer, cache, scores)
        out = torch.empty_like(q)
        if len(self._short):
            out[self._short] = self._attend_short(q[self._short], layer, cache, scores)
        for part, span, tokens in self._long:
            first = pages_before(tokens - span.tokens, scores)
            pages = cache.table_of(layer)[span.row : span.row + 1, first : -(-tokens // PAGE)]
            keys, values = cache.read(layer, pages)
            # Nothing beyond the last token is read: who had the page before may have left there what is no number.
            seen = tokens - first * PAGE
            entries = keys[0, :seen], values[0, :seen]
            out[part] = attend_span(q[part], entries, scores, span.tree)
        return out

    def _attend_short(self, q: Tensor, layer: int, cache: PagedCache, scores: Scores) -> Tensor:
        table = self._tables[cache.keys[layer]]
        return attend(q, *cache.layers[layer], table, self._lengths, scores)
