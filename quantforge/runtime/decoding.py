"""Decoding: prefill of the prompt, then one token per sequence and step.

The model runs in QuantForge's own decoder (`Decoder`) or, if that does not support it, in transformers.

On a GPU, a decoding step is captured as a CUDA graph: otherwise launching several hundred kernels at a few microseconds
each would take longer than reading the weights. A graph computes on fixed addresses, so the cache keeps its page table
and lengths on the device, and all pages are reserved in advance. On a CPU, the compiled programs that compute the
blocks are recorded and replayed as one (`quantforge_kernels.cpu.recording`), provided that nothing else computes them.

A recorded step is tied to a cache with a fixed number of sequences. In a serving engine that number varies, so there is
one step per batch size (`BatchedSteps`), each over a view of the cache whose rows are those of the running requests.
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
from quantforge.runtime.sampling import ChosenToken, RowSampler, choose_tokens
from quantforge_kernels.cpu import many_rows
from quantforge_kernels.cpu.instruction_sets import best_instruction_set

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge_kernels.cpu.recording import RecordedPrograms

PREFILL_CHUNK_TOKENS = 2048  # tokens of one prefill pass, over all sequences
WARMUP_RUNS = 2  # runs before a CUDA graph is captured


def create_engine(
    model: PreTrainedModel, cache: str = "", scales: LayerScales | None = None
) -> tuple[DecodingEngine, int | None]:
    """Create the decoding engine for a model; also return the KV-cache bytes per token (None for transformers).

    If ``cache`` is empty and calibrated ``scales`` are given, the cache is stored in fp8. Models that run through
    transformers use its cache, and ``scales`` are ignored.

    Raises:
        RefusedError: a cache kind was requested for a model that runs through transformers.
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
    """Engine over QuantForge's own decoder: `start` computes a batch of prompts, each `step` appends one token."""

    def __init__(self, decoder: Decoder, cache: str = "") -> None:
        self._decoder = decoder
        self._cache_kind = cache
        self._cache: PagedCache | None = None
        self._step: DecodingStep | None = None
        self.device = decoder.device

    def start(self, ids: Tensor, new_tokens: int) -> Tensor:
        """Prefill prompts ``[sequences, tokens]`` and reserve ``new_tokens`` more; return logits like `step`."""
        cache = self._decoder.cache(len(ids), ids.shape[1] + new_tokens, self._cache_kind)
        self._cache, self._step = cache, DecodingStep(self._decoder, cache)
        return prefill(self._decoder, ids, cache, new_tokens)

    def step(self, ids: Tensor) -> Tensor:
        """Append one token ``ids`` ``[sequences]`` to each sequence; return logits ``[sequences, vocabulary]``."""
        assert self._step is not None
        return self._step(ids)

    def reorder(self, parents: Sequence[int], shared_tokens: int) -> None:
        """Replace the cached state of each sequence with that of its parent, as beam search requires.

        Args:
            parents: for each sequence, the index of the sequence to copy.
            shared_tokens: number of leading tokens that all sequences share, which need not be copied.
        """
        assert self._cache is not None
        self._cache.copy_rows(parents, shared_tokens)


class TransformersEngine:
    """Engine over the forward pass and the cache of transformers, with the interface of `DecoderEngine`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache: Any = None
        self.device = model.device

    def start(self, ids: Tensor, new_tokens: int) -> Tensor:  # noqa: ARG002 (its cache grows)
        """Prefill prompts ``[sequences, tokens]``; return logits ``[sequences, vocabulary]``."""
        self._cache = None
        return self._forward(ids)

    def step(self, ids: Tensor) -> Tensor:
        """Append one token to each sequence; return logits ``[sequences, vocabulary]``."""
        return self._forward(ids[:, None])

    def reorder(self, parents: Sequence[int], shared_tokens: int) -> None:  # noqa: ARG002 (it copies all)
        """Replace the cached state of each sequence with that of its parent."""
        self._cache.reorder_cache(torch.tensor(parents, device=self.device))

    def _forward(self, ids: Tensor) -> Tensor:
        with many_rows.widen_products(self._model.dtype):
            output = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        logits: Tensor = output.logits[:, -1]
        return logits


DecodingEngine = DecoderEngine | TransformersEngine


@torch.inference_mode()
def generate_choices(
    engine: DecodingEngine,
    ids: Sequence[int],
    new_tokens: int,
    samplers: Sequence[RowSampler],
    finished: Container[int] = (),
) -> Iterator[dict[int, ChosenToken]]:
    """Decode several completions of one prompt in one batch; yield the new token of each by its index, step by step.

    Args:
        engine: computes logits.
        ids: token ids of the prompt.
        new_tokens: most new tokens of each completion.
        samplers: one for each completion.
        finished: indices of finished completions; the caller may add to it between steps.

    Raises:
        InputError: a logit is NaN or infinite.
    """
    prompts = torch.tensor([list(ids)] * len(samplers), device=engine.device)
    logits = engine.start(prompts, new_tokens).float()
    last_tokens = [0] * len(samplers)
    for step in range(new_tokens):
        active = [row for row in range(len(samplers)) if row not in finished]
        if not active:
            return
        if step:
            logits = engine.step(torch.tensor(last_tokens, device=engine.device)).float()
        active_logits = logits if len(active) == len(samplers) else logits[active]
        chosen_tokens = choose_tokens([samplers[row] for row in active], active_logits)
        for row, token in zip(active, chosen_tokens, strict=True):
            last_tokens[row] = token.token
        yield dict(zip(active, chosen_tokens, strict=True))


def generate_tokens(
    engine: DecodingEngine, ids: Sequence[int], new_tokens: int, sampling: Sampling
) -> Iterator[int]:
    """Yield up to ``new_tokens`` tokens after a prompt, each as soon as it is chosen; raises as `generate_choices`."""
    for chosen_tokens in generate_choices(engine, ids, new_tokens, [RowSampler(sampling, ids)]):
        yield chosen_tokens[0].token


def prefill(decoder: Decoder, ids: Tensor, cache: PagedCache, new_tokens: int) -> Tensor:
    """Compute prompts ``[sequences, tokens]`` in chunks; return the logits after their last tokens.

    Pages for ``new_tokens`` further tokens are reserved.

    Raises:
        InputError: the cache has too few free pages.
    """
    sequences, length = ids.shape
    assert sequences == cache.sequences
    for sequence in range(sequences):
        cache.reserve(sequence, cache.length(sequence) + length + new_tokens)
    step = max(1, PREFILL_CHUNK_TOKENS // sequences)
    hidden = None
    for first in range(0, length, step):
        hidden = decoder.hidden(ids[:, first : first + step], cache)
    assert hidden is not None
    cache.advance_all(length)
    return decoder.logits(hidden[:, -1])


class DecodingStep:
    """A decoding step that appends one token to every sequence of a cache; replayed as a CUDA graph on a GPU.

    Args:
        decoder: the model.
        cache: the KV cache, with pages reserved for all future steps.
        graph: whether to capture a CUDA graph; by default on a GPU, unless `Decoder.needs_host_sync`.

    Attributes:
        recorded: the recorded CPU programs after the first step; None if they do not cover the whole step.
    """

    def __init__(self, decoder: Decoder, cache: CacheRows, graph: bool | None = None) -> None:
        self._decoder = decoder
        self._cache = cache
        self._ids = torch.zeros(cache.sequences, 1, dtype=torch.long, device=decoder.device)
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        can_capture = decoder.device.type == "cuda" and not decoder.needs_host_sync
        self._use_cuda_graph = can_capture if graph is None else graph
        self._use_recorded_programs = graph is None and best_instruction_set() is not None
        # The tensors that the recorded programs read
        self._recorded_inputs: BlockInputs | None = None
        self.recorded: RecordedPrograms | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """Append one token ``ids`` ``[sequences]`` to each sequence; return logits ``[sequences, vocabulary]``."""
        self._ids.copy_(ids[:, None])
        if self._use_cuda_graph and self._graph is None:
            self._capture_cuda_graph()
        if self._graph is None:
            logits = self._compute_on_cpu() if self._use_recorded_programs else self._compute()
        else:
            self._graph.replay()
            assert self._logits is not None
            logits = self._logits
        self._cache.advance_all(1)
        return logits

    def _compute(self) -> Tensor:
        return self._decoder.logits(self._decoder.hidden(self._ids, self._cache)[:, -1])

    def _compute_on_cpu(self) -> Tensor:
        """Replay the recorded CPU programs; record them on the first call."""
        inputs = self._decoder.prepare_inputs(self._ids, self._cache)
        if self._recorded_inputs is None:
            self._recorded_inputs = inputs
            from quantforge_kernels.cpu.recording import record

            hidden, self.recorded = record(lambda: self._decoder.run_blocks(inputs, self._cache))
        elif self.recorded is None:
            hidden = self._decoder.run_blocks(inputs, self._cache)
        else:
            for recorded_tensor, new_tensor in zip(
                self._recorded_inputs.tensors(), inputs.tensors(), strict=True
            ):
                recorded_tensor.copy_(new_tensor)
            hidden = self.recorded.replay()
        return self._decoder.logits(hidden[:, -1])

    def _capture_cuda_graph(self) -> None:
        """Capture the step as a CUDA graph after warm-up runs that compile all kernels; restore the cache lengths."""
        lengths = self._cache.lengths.clone()
        with torch.cuda.device(self._decoder.device):  # streams are of the thread's current device
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_RUNS):
                    self._compute()
                    self._cache.lengths.copy_(lengths)  # the same place is written again
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            # A stream of our own: the default one is of the device of the process's first capture.
            with torch.cuda.graph(self._graph, stream=stream):
                self._logits = self._compute()
        self._cache.lengths.copy_(lengths)


class BatchedSteps:
    """Decoding steps for varying batch sizes: one recorded step per size, with sizes rounded up to a few values.

    Few sizes are used because every recorded step keeps memory of its own. Padding rows repeat the last request: they
    compute the same numbers and write them to the same place, so they need no pages.

    Args:
        decoder: the model.
        cache: KV cache of all requests, with pages reserved for the tokens to decode.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        self._decoder = decoder
        self._cache = cache
        self._steps: dict[int, tuple[CacheView, DecodingStep]] = {}

    def __call__(self, ids: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Append one token to each of the given cache rows; return logits ``[rows, vocabulary]``."""
        size = padded_batch_size(len(rows))
        if size not in self._steps:
            view = self._cache.view(size)
            self._steps[size] = view, DecodingStep(self._decoder, view)
        view, step = self._steps[size]
        view.select(self._cache, rows)
        padded_ids = [*ids, *[ids[-1]] * (size - len(ids))]
        logits = step(torch.tensor(padded_ids, device=self._decoder.device))
        self._cache.append_one_each(rows)
        return logits[: len(rows)]


def padded_batch_size(rows: int) -> int:
    """Round a batch size up to the next size that has a recorded step: 1, 2, 4, 8, 12, ..., 32, 40, 48, ..."""
    if rows <= 2:
        return rows
    unit = 4 if rows <= 32 else 8
    return -(-rows // unit) * unit
