"""Decoding: prefill, then one token per sequence and step, by the own decoder or the forward of transformers.

A decoding step on a GPU is launched as one CUDA graph: some hundred launches of a few microseconds
each would otherwise take longer than reading the weights. The graph computes from fixed addresses,
which is why the cache keeps its table and lengths on the device, and reserves all pages before.
On a processor the programs that compute the blocks are recorded and run again as one, if all of the
blocks is computed by such (`quantforge_kernels.cpu.recording`).

What is recorded belongs to a cache with so many sequences. In an engine requests come and go, so each number of them
has a step of its own (`EngineSteps`), over a view of the cache whose rows are those of the requests that run now.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantforge.errors import RefusedError
from quantforge.runtime.cache import CacheRows, CacheView, LayerScales, PagedCache
from quantforge.runtime.decoder import BlockInputs, Decoder, supports
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.sampling import Chosen, RowSampler, choose_rows
from quantforge_kernels.cpu import many_rows
from quantforge_kernels.cpu.instruction_sets import best_instruction_set

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge_kernels.cpu.recording import RecordedPrograms

CHUNK_TOKENS = 2048  # of a prefill, over all sequences
WARM_UPS = 2


def engine_of(
    model: PreTrainedModel, cache: str = "", scales: LayerScales | None = None
) -> tuple[DecodingEngine, int | None]:
    """Return the engine that decodes a model, and the bytes of a token in its cache where that is ours.

    Without a kind of ``cache``, measured ``scales`` stand for one in fp8. The forward of transformers has its own
    cache, and takes no notice of them.

    Raises:
        RefusedError: a kind of cache for a model that the forward of transformers computes.
    """
    if not supports(model):
        if cache:
            raise RefusedError(
                f"a cache in {cache}: model_type {model.config.model_type!r} is computed by transformers, with its own",
                "leave --cache out",
            )
        return TransformersEngine(model), None
    decoder = Decoder(model, scales=scales)
    cache = cache or ("fp8" if scales else "")
    return DecoderEngine(decoder, cache), decoder.cache_shape(cache).token_bytes


class DecoderEngine:
    """The own decoder: ``start`` a batch of prompts, then ``step`` by step."""

    def __init__(self, decoder: Decoder, cache: str = "") -> None:
        self._decoder = decoder
        self._kind = cache
        self._cache: PagedCache | None = None
        self._step: Step | None = None
        self.device = decoder.device

    def start(self, ids: Tensor, new_tokens: int) -> Tensor:
        """Compute prompts ``[sequences, tokens]``, which ``new_tokens`` steps may follow; return logits as `step`."""
        cache = self._decoder.cache(len(ids), ids.shape[1] + new_tokens, self._kind)
        self._cache, self._step = cache, Step(self._decoder, cache)
        return prefill(self._decoder, ids, cache, new_tokens)

    def step(self, ids: Tensor) -> Tensor:
        """Append ``ids`` ``[sequences]``; return logits ``[sequences, vocabulary]``."""
        assert self._step is not None
        return self._step(ids)

    def reorder(self, parents: Sequence[int], same: int) -> None:
        """Make each sequence continue from what another one has computed so far.

        Args:
            parents: for each sequence, the one that it becomes a copy of.
            same: so many first tokens each has in common with that one.
        """
        assert self._cache is not None
        self._cache.copy_rows(parents, same)


class TransformersEngine:
    """The forward of transformers with our linear layers, and its cache; methods as those of `DecoderEngine`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache: Any = None
        self.device = model.device

    def start(self, ids: Tensor, new_tokens: int) -> Tensor:  # noqa: ARG002 (its cache grows)
        """Compute prompts."""
        self._cache = None
        return self._forward(ids)

    def step(self, ids: Tensor) -> Tensor:
        """Append one token per sequence."""
        return self._forward(ids[:, None])

    def reorder(self, parents: Sequence[int], same: int) -> None:  # noqa: ARG002 (it copies all)
        """Copy rows of the cache."""
        self._cache.reorder_cache(torch.tensor(parents, device=self.device))

    def _forward(self, ids: Tensor) -> Tensor:
        with many_rows.widen_products(self._model.dtype):
            output = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        logits: Tensor = output.logits[:, -1]
        return logits


DecodingEngine = DecoderEngine | TransformersEngine


@torch.inference_mode()
def generate_rows(
    engine: DecodingEngine,
    ids: Sequence[int],
    new_tokens: int,
    samplers: Sequence[RowSampler],
    ended: Container[int] = (),
) -> Iterator[dict[int, Chosen]]:
    """Yield the tokens of several answers to one prompt, computed together, as soon as they are chosen.

    Args:
        engine: computes logits.
        ids: the prompt.
        new_tokens: at most so many for each answer.
        samplers: one for each answer.
        ended: numbers of answers for which nothing more is chosen; may grow between steps.

    Raises:
        InputError: logits that are no numbers.
    """
    prompts = torch.tensor([list(ids)] * len(samplers), device=engine.device)
    logits = engine.start(prompts, new_tokens).float()
    taken = [0] * len(samplers)
    for step in range(new_tokens):
        open_rows = [row for row in range(len(samplers)) if row not in ended]
        if not open_rows:
            return
        if step:
            logits = engine.step(torch.tensor(taken, device=engine.device)).float()
        those = logits if len(open_rows) == len(samplers) else logits[open_rows]
        chosen = choose_rows([samplers[row] for row in open_rows], those)
        for row, one in zip(open_rows, chosen, strict=True):
            taken[row] = one.token
        yield dict(zip(open_rows, chosen, strict=True))


def generate_tokens(
    engine: DecodingEngine, ids: Sequence[int], new_tokens: int, sampling: Sampling
) -> Iterator[int]:
    """Yield up to ``new_tokens`` tokens after a prompt, each as soon as it is chosen; errors as `generate_rows`."""
    for chosen in generate_rows(engine, ids, new_tokens, [RowSampler(sampling, ids)]):
        yield chosen[0].token


def prefill(decoder: Decoder, ids: Tensor, cache: PagedCache, new_tokens: int) -> Tensor:
    """Compute prompts ``[sequences, tokens]`` in chunks; return the logits of their last tokens.

    Pages for ``new_tokens`` more are reserved.

    Raises:
        InputError: the cache has no room for them.
    """
    sequences, length = ids.shape
    assert sequences == cache.sequences
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

    def __init__(self, decoder: Decoder, cache: CacheRows, graph: bool | None = None) -> None:
        self._decoder = decoder
        self._cache = cache
        self._ids = torch.zeros(cache.sequences, 1, dtype=torch.long, device=decoder.device)
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        captured = decoder.device.type == "cuda" and not decoder.waits
        self._wanted = captured if graph is None else graph
        self._record = graph is None and best_instruction_set() is not None
        self._entry: BlockInputs | None = None  # what the recorded programs read
        self.recorded: RecordedPrograms | None = None

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
            hidden = self.recorded.replay()
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
            view = self._cache.view(size)
            self._steps[size] = view, Step(self._decoder, view)
        view, step = self._steps[size]
        view.show(self._cache, rows)
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
