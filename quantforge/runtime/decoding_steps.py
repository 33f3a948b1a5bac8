"""Decoding steps: prefill the prompts, then one token per sequence and step.

A decoding step on a GPU is launched as one CUDA graph: some hundred launches of a few microseconds
each would otherwise take longer than reading the weights. The graph computes from fixed addresses,
which is why the cache keeps its table and lengths on the device, and reserves all pages before.
On a processor the programs that compute the blocks are recorded and run again as one, if all of the
blocks is computed by such (`quantforge_kernels.cpu.recording`).

What is recorded belongs to a cache with so many sequences. In an engine requests come and go, so each number of them
has a step of its own (`EngineSteps`), over a view of the cache whose rows are those of the requests that run now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.runtime.cache import CacheView, PagedCache
from quantforge.runtime.decoder import Arrivals, Decoder
from quantforge_kernels.cpu.features import feature

if TYPE_CHECKING:
    from quantforge_kernels.cpu.recording import Recorded

CHUNK_TOKENS = 2048  # of a prefill, over all sequences
WARM_UPS = 2


def prefill(decoder: Decoder, ids: Tensor, cache: PagedCache, new_tokens: int) -> Tensor:
    """Compute prompts ``[sequences, tokens]`` in chunks; return the logits of their last tokens.

    Pages for ``new_tokens`` more are reserved.

    Raises:
        InputError: the cache has no room for them.
    """
    sequences, length = ids.shape
    if sequences != cache.sequences:
        raise InputError(
            f"{sequences} prompts for a cache of {cache.sequences} sequences",
            "make one of its size",
        )
    for sequence in range(sequences):
        cache.reserve(sequence, cache.length(sequence) + length + new_tokens)
    step = max(1, CHUNK_TOKENS // sequences)
    hidden = None
    for first in range(0, length, step):
        hidden = decoder.hidden(ids[:, first : first + step], cache)
    assert hidden is not None
    cache.count(length)
    return decoder.logits(hidden[:, -1])


class Step:
    """One more token for every sequence; a CUDA graph where there is a GPU.

    Args:
        decoder: the model.
        cache: pages are reserved for all steps that will come.
        graph: capture a graph; when left out, on a GPU where the host need not wait (`Decoder.waits`).

    Attributes:
        recorded: the programs of a step on a processor, once there was one, if they are all of it.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache, graph: bool | None = None) -> None:
        self._decoder = decoder
        self._cache = cache
        self._ids = torch.zeros(cache.sequences, 1, dtype=torch.long, device=decoder.device)
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        captured = decoder.device.type == "cuda" and not decoder.waits
        self._wanted = captured if graph is None else graph
        self._record = graph is None and feature() is not None
        self._entry: Arrivals | None = None  # what the recorded programs read
        self.recorded: Recorded | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """Return logits ``[sequences, vocabulary]`` after ``ids`` ``[sequences]``."""
        self._ids.copy_(ids[:, None])
        if self._wanted and self._graph is None:
            self._capture()
        if self._graph is None:
            logits = self._on_processor() if self._record else self._compute()
        else:
            self._graph.replay()
            assert self._logits is not None
            logits = self._logits
        self._cache.count(1)
        return logits

    def _compute(self) -> Tensor:
        return self._decoder.logits(self._decoder.hidden(self._ids, self._cache)[:, -1])

    def _on_processor(self) -> Tensor:
        """Run the recorded programs; record them at the first step."""
        entry = self._decoder.enter(self._ids, self._cache)
        if self._entry is None:
            self._entry = entry
            from quantforge_kernels.cpu.recording import record

            hidden, self.recorded = record(lambda: self._decoder.blocks(entry, self._cache))
        elif self.recorded is None:
            hidden = self._decoder.blocks(entry, self._cache)
        else:
            for mine, given in zip(self._entry.tensors(), entry.tensors(), strict=True):
                mine.copy_(given)
            hidden = self.recorded.play()
        return self._decoder.logits(hidden[:, -1])

    def _capture(self) -> None:
        """Run the step twice, so that every kernel is compiled, and record it; undo its effect."""
        lengths = self._cache.lengths.clone()
        with torch.cuda.device(self._decoder.device):  # streams are of the thread's current device
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self._compute()
                    self._cache.lengths.copy_(lengths)  # the same place is written again
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            # A stream of our own: the default one is of the device of the process's first capture.
            with torch.cuda.graph(self._graph, stream=stream):
                self._logits = self._compute()
        self._cache.lengths.copy_(lengths)


class EngineSteps:
    """Steps by their number of rows, which is rounded up to a few, since every record keeps its own memory.

    A row that is left over is the last request once more: it computes the same numbers and writes them to the same
    place, so it needs no pages of its own.

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


def rounded(rows: int) -> int:
    """Return the number of rows of the step that computes so many: 1, 2, 4, 8, 12, ..., 32, 40, 48, ..."""
    if rows <= 2:
        return rows
    unit = 4 if rows <= 32 else 8
    return -(-rows // unit) * unit
