"""Generation: prefill the prompts, then one token per sequence and step.

A decoding step on a GPU is launched as one CUDA graph: some hundred launches of a few microseconds
each would otherwise take longer than reading the weights. The graph computes from fixed addresses,
which is why the cache keeps its table and lengths on the device, and reserves all pages before.
On a processor the programs that compute the blocks are recorded and run again as one, if all of the
blocks is computed by such (`quantforge_kernels.cpu.recording`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.runtime.arrivals import Arrivals
from quantforge.runtime.cache import PagedCache
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.sampling import RowSampler, Sampling, choose_rows
from quantforge_kernels.cpu.features import feature

if TYPE_CHECKING:
    from quantforge_kernels.cpu.recording import Recorded

CHUNK_TOKENS = 2048  # of a prefill, over all sequences
WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class StopLimits:
    """Limits of a generation, and the kind of its cache.

    Attributes:
        new_tokens: at most so many per sequence.
        stop: tokens that end a sequence.
        cache: kind of the cache, see `quantforge.architectures.cache_kinds`.
    """

    new_tokens: int = 32
    stop: frozenset[int] = frozenset()
    cache: str = ""


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    limits: StopLimits | None = None,
    sampling: Sampling | None = None,
) -> list[list[int]]:
    """Continue every prompt.

    Args:
        decoder: the model.
        prompts: token ids.
        limits: how much.
        sampling: how tokens are chosen, for each prompt as if it were alone.

    Returns:
        The new tokens of each prompt, its stop token included.

    Raises:
        InputError: no prompt or no new token; a prompt that is empty, or longer with all of its new tokens than
            the model has positions; or logits that are NaN or infinite.
    """
    limits, sampling = limits or StopLimits(), sampling or Sampling()
    check_prompts(decoder, prompts, limits.new_tokens)
    # Sequences of one length advance together: prompts are grouped by it, results put in order.
    results: dict[int, list[int]] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([list(prompts[place]) for place in places], device=decoder.device)
        found = _generate(decoder, ids, limits, sampling)
        results |= dict(zip(places, found, strict=True))
    return [results[place] for place in range(len(prompts))]


def check_prompts(decoder: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    """Refuse what cannot be continued; see `generate`."""
    if not prompts or new_tokens < 1:
        raise InputError(
            f"{len(prompts)} prompts, {new_tokens} new tokens", "give at least one of each"
        )
    for place, prompt in enumerate(prompts):
        if not prompt:
            raise InputError(
                f"prompt {place} has no token", "begin it with the model's first token"
            )
        if len(prompt) + new_tokens > decoder.positions:
            raise InputError(
                f"prompt {place} of {len(prompt)} tokens and {new_tokens} new ones: the model has "
                f"{decoder.positions} positions",
                "shorten the prompt, or ask for fewer tokens",
            )


def _generate(
    decoder: Decoder, ids: Tensor, limits: StopLimits, sampling: Sampling
) -> list[list[int]]:
    sequences, length = ids.shape
    cache = decoder.cache(sequences, length + limits.new_tokens, limits.cache)
    samplers = [RowSampler(sampling, prompt) for prompt in ids.tolist()]
    logits = prefill(decoder, ids, cache, limits.new_tokens)
    step = Step(decoder, cache)
    found: list[list[int]] = [[] for _ in range(sequences)]
    for number in range(limits.new_tokens):
        going = [row for row, tokens in enumerate(found) if not set(tokens[-1:]) & limits.stop]
        if not going:
            break
        if number:
            last = [tokens[-1] for tokens in found]
            logits = step(torch.tensor(last, device=decoder.device))
        chosen = choose_rows([samplers[row] for row in going], logits[going].float())
        for row, one in zip(going, chosen, strict=True):
            found[row].append(one.token)
    return found


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
