"""One readable decoder for the families that have a record of their blocks, on packed weights and a paged cache.

A block computes, with residuals ``x``:

    h = norm?(x);  q, k, v = split(h W_qkv);  q, k = rotate(norm?(q), norm?(k), positions)
    x += norm?(attention(q, k, v) W_o)
    h = norm?(x);  x += norm?((act(h W_gate) * (h W_up)) W_down)

The families differ in data only (`quantforge.architectures.decoder_graph`): norms before each half, after it, or both,
that multiply by ``1 + w`` (gemma), norms over the heads of q and k or over all of them (olmo2), before or behind the
rotation (hunyuan), biases, fused projections, soft caps, sliding windows, two rotary bases (gemma3), layers without
rotary (smollm3, cohere2), neighbours rotated instead of halves (glm), both halves side by side (cohere), factors
(granite). Norms that are not RMS and MLPs without gate are computed by the modules of transformers. Weights, rotary
frequencies and configuration are those that `load` put into the skeleton of transformers; the logits are those of
transformers, which a test holds for every family. The launches of a step are few: norm with residual, rotary and gate
are one kernel each on a GPU (`quantforge_kernels.layers`), and attention reads the cache in its stored form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantforge.errors import RefusedError
from quantforge.runtime.active_experts import waits
from quantforge.runtime.cache import PagedCache
from quantforge.runtime.cache_layout import CacheShape
from quantforge.runtime.computed import computed, supports
from quantforge.runtime.decoder_layer import Layer, layer_of, multiply, neighbours_to_halves
from quantforge.runtime.prompt_attention import attend_many
from quantforge.runtime.ragged import RaggedBatch, Span, Taps
from quantforge.runtime.rotary import angles_at, queries_of, width_of
from quantforge.runtime.stored_entries import LayerScales
from quantforge.runtime.tensor_shares import ranks_of
from quantforge_kernels.attention import attend
from quantforge_kernels.layers import add_norm, gelu_gate, rotate, silu_gate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Tokens on their way into the blocks.

    Attributes:
        x: embeddings ``[tokens of all sequences, hidden]``.
        slots: places of the tokens in the cache, by key of a layer (`CacheLayout.keys`).
        angles: cosines and sines by kind of rotary, see `Layer.rotary`.
        ragged: spans of different lengths; None: as many tokens of every sequence of the cache.
    """

    x: Tensor
    slots: dict[int, Tensor]
    angles: dict[str, tuple[Tensor, Tensor]]
    ragged: RaggedBatch | None = None

    def note(self, block: int, x: Tensor) -> None:
        """Put what goes into a block ``[tokens, hidden]`` where it is asked for."""
        if self.ragged is not None and self.ragged.taps and block in self.ragged.taps:
            self.ragged.taps[block] = x

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in one order."""
        return [
            self.x,
            *(self.slots[key] for key in sorted(self.slots)),
            *(part for key in sorted(self.angles) for part in self.angles[key]),
        ]


class Decoder:
    """A model that was loaded, computed by this module.

    Args:
        model: its modules are used, not copied.
        join: multiply layers with the same input as one.
        scales: by layer, measured scales of keys and values, for caches in fp8.

    Attributes:
        positions, vocabulary: most tokens of a sequence, and how many kinds of them there are.
        waits: the host has to know which experts are asked for, or has other processes: no CUDA graph holds a step.

    Raises:
        RefusedError: a family or a kind of rotary that is not computed here.
    """

    def __init__(
        self, model: PreTrainedModel, join: bool = True, scales: LayerScales | None = None
    ) -> None:
        family = computed(model)
        if family is None or family.own_graph is None or not supports(model):
            raise RefusedError(
                f"model_type {model.config.model_type!r} is not computed by the own decoder",
                "such models run through transformers",
            )
        config: Any = model.config
        inner: Any = model.base_model
        sizes = family.dimensions(config.to_dict())
        ranks = ranks_of(model)
        self.kv_heads, self.head = sizes.kv_heads // ranks, sizes.head
        self._embedding: Any = model.get_submodule(family.embedding)
        self.dtype: torch.dtype = self._embedding.weight.dtype
        self.device: torch.device = self._embedding.weight.device
        self.positions: int = config.max_position_embeddings
        self.vocabulary = len(self._embedding.weight)
        self._output: nn.Module = model.get_output_embeddings()
        self._graph = family.own_graph
        self._norm: Any = model.get_submodule(family.final_norm)
        self._epsilon: float | None = getattr(config, "rms_norm_eps", None)  # None: other norms
        self._offset = family.norm_offset
        self._embedding_factor = _factor(config, "embedding_multiplier")
        self._residual_factor = _factor(config, "residual_multiplier")
        self._logit_factor = _factor(config, "logit_scale") / _factor(config, "logits_scaling")
        self._final_cap: float = getattr(config, "final_logit_softcapping", None) or 0.0
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        self._gate = {"silu": silu_gate, "gelu_pytorch_tanh": gelu_gate}.get(activation)
        beside = self._graph.side_by_side
        self._side_by_side = bool(getattr(config, beside) if isinstance(beside, str) else beside)
        self._rotary = inner.rotary_emb
        self._scales = scales
        blocks: Any = model.get_submodule(family.blocks)
        self.layers = [
            layer_of(block, family, model, index, join) for index, block in enumerate(blocks)
        ]
        self.waits = waits(model) or ranks > 1
        self._rotary_keys = sorted({x.rotary for x in self.layers if x.rotary is not None})

    def cache(
        self,
        sequences: int,
        tokens: int,
        kind: str = "",
        pages: int | None = None,
        ahead: int = 0,
    ) -> PagedCache:
        """Make a cache for some sequences of at most ``tokens`` tokens; errors as `CacheShape` and `PagedCache`."""
        shape = self.cache_shape(kind)
        return PagedCache(shape, sequences, tokens, self.device, pages, self._scales, ahead)

    def cache_shape(self, kind: str = "") -> CacheShape:
        """Return the shape of a cache of this model."""
        windows = tuple(layer.scores.window for layer in self.layers)
        return CacheShape(len(self.layers), self.kv_heads, self.head, kind, self.dtype, windows)

    def hidden(self, ids: Tensor, cache: PagedCache) -> Tensor:
        """Compute the next tokens of every sequence, and append them to the cache; the caller calls its `count`.

        Args:
            ids: ``[sequences, tokens]``; pages are reserved.
            cache: holds what came before.

        Returns:
            Final hidden states ``[sequences, tokens, hidden]``, after the last norm.
        """
        return self.blocks(self.enter(ids, cache), cache)

    def hidden_of(
        self, ids: Tensor, spans: Sequence[Span], cache: PagedCache, taps: Taps = None
    ) -> Tensor:
        """Compute the next tokens of some sequences, and append them to the cache.

        Args:
            ids: ``[tokens]``, those of every span in turn.
            spans: of different sequences; pages are reserved.
            cache: holds what came before, and is advanced.
            taps: its keys are blocks; what goes into each of them is put there, ``[tokens, hidden]``.

        Returns:
            Final hidden states ``[tokens, hidden]``, after the last norm.
        """
        batch = RaggedBatch(spans, cache, taps)
        entry = self._entry(ids, batch.slots, batch.positions, cache.most_tokens, batch)
        hidden = self.blocks(entry, cache)[0]
        for span in spans:
            cache.advance(span.row, span.tokens)
        return hidden

    def enter(self, ids: Tensor, cache: PagedCache) -> Arrivals:
        """Return what blocks need of the next tokens (embeddings, places, angles); advance ``lengths`` of the cache."""
        tokens = ids.shape[1]
        slots = {key: places.flatten() for key, places in cache.slots(tokens).items()}
        positions = cache.lengths[:, None] + torch.arange(tokens, device=ids.device)
        entry = self._entry(ids.flatten(), slots, positions.flatten(), cache.most_tokens)
        cache.lengths += tokens
        return entry

    def _entry(
        self,
        ids: Tensor,
        slots: dict[int, Tensor],
        positions: Tensor,
        most: int,
        ragged: RaggedBatch | None = None,
    ) -> Arrivals:
        angles = angles_at(self._rotary, self._rotary_keys, positions, most, self.dtype)
        x = _times(self._embedding(ids), self._embedding_factor)
        return Arrivals(x, slots, angles, ragged)

    def blocks(self, entry: Arrivals, cache: PagedCache) -> Tensor:
        """Compute all blocks and the last norm; see `hidden`, and `hidden_of`, whose spans are one sequence here."""
        x, update, sequences = entry.x, None, 1 if entry.ragged else cache.sequences
        for index, layer in enumerate(self.layers):
            h, x = self._add_norm(x, update, layer.before_attention)
            entry.note(index, x)
            update = self._attention(layer, index, h, entry, cache)
            update = self._written(update, layer.after_attention)
            if self._side_by_side:
                if layer.before_mlp is not None:
                    h = self._normed(x, layer.before_mlp)
                update = update + self._written(layer.mixed(h, self._gate), layer.after_mlp)
            else:
                h, x = self._add_norm(x, update, layer.before_mlp)
                update = self._written(layer.mixed(h, self._gate), layer.after_mlp)
        h, _ = self._add_norm(x, update, self._norm)
        return h.view(sequences, len(h) // sequences, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., vocabulary]`` in float32."""
        logits = _times(multiply(self._output, hidden), self._logit_factor)
        if self._final_cap:
            logits = torch.tanh(logits / self._final_cap) * self._final_cap
        return logits.float()

    def _attention(
        self, layer: Layer, index: int, h: Tensor, entry: Arrivals, cache: PagedCache
    ) -> Tensor:
        module, sequences = layer.attention, cache.sequences
        q, k, v = layer.projections(h)
        if layer.head_norms is not None and self._graph.norms_of_all:
            q, k = (self._normed(x, norm) for x, norm in zip((q, k), layer.head_norms, strict=True))
        q, k, v = (part.view(len(h), -1, self.head) for part in (q, k, v))
        q, k = self._placed(layer, q, k, entry)
        cache.write(index, entry.slots[cache.keys[index]], k, v)
        if entry.ragged is not None:
            out = entry.ragged.attend(q, index, cache, layer.scores)
        elif len(h) == sequences:
            stores, table = cache.layers[index], cache.table_of(index)
            out = attend(q, *stores, table, cache.lengths, layer.scores)
        else:
            several = q.view(sequences, -1, *q.shape[1:])
            out = attend_many(several, index, cache, layer.scores)
        return multiply(getattr(module, self._graph.output), out.reshape(len(h), -1))

    def _placed(self, layer: Layer, q: Tensor, k: Tensor, entry: Arrivals) -> tuple[Tensor, Tensor]:
        """Return queries and keys ``[tokens, heads, head]``, normed and rotated."""
        graph, norms = self._graph, None if self._graph.norms_of_all else layer.head_norms
        if norms is not None and not graph.norms_behind:
            q, k = self._normed(q, norms[0]), self._normed(k, norms[1])
        if layer.rotary is not None:
            if graph.neighbours:
                q, k = (
                    neighbours_to_halves(x, width_of(entry.angles[layer.rotary])) for x in (q, k)
                )
            q = rotate(q, *entry.angles[queries_of(layer.rotary, entry.angles)])
            k = rotate(k, *entry.angles[layer.rotary])
        if norms is not None and graph.norms_behind:
            q, k = self._normed(q, norms[0]), self._normed(k, norms[1])
        return q, k

    def _written(self, update: Tensor, norm: Any) -> Tensor:
        """Return what a half of a block adds to the residuals, of its output."""
        return _times(self._normed(update, norm), self._residual_factor)

    def _add_norm(self, x: Tensor, update: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        if norm is not None and self._epsilon is not None:
            return add_norm(x, update, norm.weight, self._epsilon, self._offset)
        x = x if update is None else x + update
        return (x if norm is None else norm(x)), x

    def _normed(self, x: Tensor, norm: Any) -> Tensor:
        return x if norm is None else self._add_norm(x, None, norm)[0]


def _factor(config: Any, key: str) -> float:
    """Return a factor that the configuration of a family declares; 1 where it has none."""
    return float(getattr(config, key, None) or 1.0)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
