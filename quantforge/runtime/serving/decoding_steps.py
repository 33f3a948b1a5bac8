"""Steps in which every request decodes one token, as one list of programs or one CUDA graph.

What `quantforge.runtime.generate.Step` records belongs to a cache with so many sequences. Requests come and go, so each
number of them has a step of its own, over a view of the cache in which the rows are those of the requests that run now.
Numbers are rounded up to a few, since every record keeps its own memory. A row that is left over is the last request
once more: it computes the same numbers and writes them to the same place, so it needs no pages of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantforge.runtime.cache import PagedCache
from quantforge.runtime.cache_view import CacheView
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.generate import Step


def rounded(rows: int) -> int:
    """Return the number of rows of the step that computes so many: 1, 2, 4, 8, 12, ..., 32, 40, 48, ..."""
    if rows <= 2:
        return rows
    unit = 4 if rows <= 32 else 8
    return -(-rows // unit) * unit


class DecodingSteps:
    """Steps by their number of rows.

    Args:
        decoder: the model.
        cache: of all requests; whatever is decoded has its page.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        self._decoder = decoder
        self._cache = cache
        self._steps: dict[int, tuple[CacheView, Step]] = {}

    def __call__(self, ids: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Return logits ``[rows, vocabulary]`` after one token of each row of the cache, which is then longer by it."""
        size = rounded(len(rows))
        if size not in self._steps:
            view = CacheView(self._cache, size)
            self._steps[size] = view, Step(self._decoder, view)
        view, step = self._steps[size]
        view.show(rows)
        more = [*ids, *[ids[-1]] * (size - len(ids))]
        logits = step(torch.tensor(more, device=self._decoder.device))
        self._cache.follow(rows)
        return logits[: len(rows)]
