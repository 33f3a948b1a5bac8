"""Engines: the two ways to compute the next token, the own decoder and the forward of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quantforge.errors import RefusedError
from quantforge.runtime.cache import PagedCache, copy_rows
from quantforge.runtime.computed import supports
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding_steps import Step, prefill
from quantforge.runtime.stored_entries import LayerScales
from quantforge_kernels.cpu import many_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MeasuredEngine(Protocol):
    """Something that decodes: ``start`` a batch of prompts, then ``step`` by step."""

    @property
    def device(self) -> torch.device:
        """Return where it computes."""

    def start(self, ids: Tensor, new_tokens: int) -> Tensor:
        """Compute prompts ``[sequences, tokens]``; return logits ``[sequences, vocabulary]``.

        ``new_tokens``: as many steps may follow.
        """

    def step(self, ids: Tensor) -> Tensor:
        """Append ``ids`` ``[sequences]``; return logits ``[sequences, vocabulary]``."""

    def reorder(self, parents: Sequence[int], same: int) -> None:
        """Let each sequence go on from what another one has computed so far.

        Args:
            parents: for each sequence, the one that it becomes a copy of.
            same: so many first tokens each has in common with that one.
        """


class Own:
    """The own decoder."""

    def __init__(self, decoder: Decoder, cache: str = "") -> None:
        self._decoder = decoder
        self._kind = cache
        self._cache: PagedCache | None = None
        self._step: Step | None = None
        self.device = decoder.device

    def start(self, ids: Tensor, new_tokens: int) -> Tensor:
        """Run the prompt, as `MeasuredEngine.start` says."""
        cache = self._decoder.cache(len(ids), ids.shape[1] + new_tokens, self._kind)
        self._cache, self._step = cache, Step(self._decoder, cache)
        return prefill(self._decoder, ids, cache, new_tokens)

    def step(self, ids: Tensor) -> Tensor:
        """Decode one token per sequence, as `MeasuredEngine.step` says."""
        assert self._step is not None
        return self._step(ids)

    def reorder(self, parents: Sequence[int], same: int) -> None:
        """Copy the pages that differ, as `MeasuredEngine.reorder` says."""
        assert self._cache is not None
        copy_rows(self._cache, parents, same)


class Transformers:
    """The forward of transformers with our linear layers, and its cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache: Any = None
        self.device = model.device

    def start(self, ids: Tensor, new_tokens: int) -> Tensor:  # noqa: ARG002 (its cache grows)
        """Run the prompt, as `MeasuredEngine.start` says."""
        self._cache = None
        return self._forward(ids)

    def step(self, ids: Tensor) -> Tensor:
        """Decode one token per sequence, as `MeasuredEngine.step` says."""
        return self._forward(ids[:, None])

    def reorder(self, parents: Sequence[int], same: int) -> None:  # noqa: ARG002 (it copies all)
        """Copy rows of the cache, as `MeasuredEngine.reorder` says."""
        self._cache.reorder_cache(torch.tensor(parents, device=self.device))

    def _forward(self, ids: Tensor) -> Tensor:
        with many_rows.widening(self._model.dtype):
            output = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        logits: Tensor = output.logits[:, -1]
        return logits


def engine_of(
    model: PreTrainedModel, cache: str = "", scales: LayerScales | None = None
) -> tuple[MeasuredEngine, int | None]:
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
        return Transformers(model), None
    decoder = Decoder(model, scales=scales)
    cache = cache or ("fp8" if scales else "")
    return Own(decoder, cache), decoder.cache_shape(cache).token_bytes
