"""One readable decoder for the families that have a record of their blocks, on packed weights and a paged cache.

A block computes, with residuals ``x``:

    h = norm?(x);  q, k, v = split(h W_qkv);  q, k = rotate(norm?(q), norm?(k), positions)
    x += norm?(attention(q, k, v) W_o)
    h = norm?(x);  x += norm?((act(h W_gate) * (h W_up)) W_down)

The families differ in data only (`quantforge.architectures.decoder_graph`): norms before each half, after it, or both,
that multiply by ``1 + w`` (gemma), norms over the heads of q and k or over all of them (olmo2), before or after the
rotation (hunyuan), biases, fused projections, soft caps, sliding windows, two rotary bases (gemma3), layers without
rotary (smollm3, cohere2), neighbours rotated instead of halves (glm), both halves side by side (cohere), factors
(granite). Norms that are not RMS and MLPs without gate are computed by the modules of transformers. Weights, rotary
frequencies and configuration are those that `load` put into the skeleton of transformers; the logits are those of
transformers, which a test holds for every family. The launches of a step are few: norm with residual, rotary and gate
are one kernel each on a GPU (`quantforge_kernels.layers`), and attention reads the cache in its stored form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantforge.architectures import Architecture, decoder_family
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.errors import RefusedError
from quantforge.runtime.cache import CacheRows, CacheShape, LayerScales, PagedCache
from quantforge.runtime.linear import PackedLinear, multiply, ranks_of
from quantforge.runtime.packed_experts import waits
from quantforge.runtime.ragged_attention import RaggedBatch, Span, Taps, attend_many
from quantforge.runtime.rotary import STATIC_ROTARY, angles_at, kinds_of, queries_of, width_of
from quantforge_kernels.attention import ScoreOptions, attend
from quantforge_kernels.layers import (
    add_bias,
    add_rms_norm,
    apply_rotary,
    gelu_gate,
    linear,
    silu_gate,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

SHARED = frozenset({"table"})  # of a codebook: one for all rows


def supports(model: PreTrainedModel) -> bool:
    """Return whether `Decoder` computes this model."""
    inner: Any = model.base_model
    family = decoder_family(model.config.model_type)
    return family is not None and set(kinds_of(inner.rotary_emb)) <= STATIC_ROTARY


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """What the blocks need of the next tokens.

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
        family = decoder_family(model.config.model_type)
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
        parallel = self._graph.side_by_side
        self._side_by_side = bool(
            getattr(config, parallel) if isinstance(parallel, str) else parallel
        )
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

    def hidden(self, ids: Tensor, cache: CacheRows) -> Tensor:
        """Compute the next tokens of every sequence, and append them to the cache; the caller calls its `count`.

        Args:
            ids: ``[sequences, tokens]``; pages are reserved.
            cache: holds what came before.

        Returns:
            Final hidden states ``[sequences, tokens, hidden]``, after the last norm.
        """
        return self.blocks(self.enter(ids, cache), cache)

    def hidden_of(
        self,
        ids: Tensor,
        spans: Sequence[Span],
        cache: PagedCache,
        taps: Taps = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """Compute the next tokens of some sequences, and append them to the cache.

        Args:
            ids: ``[tokens]``, those of every span in turn.
            spans: of different sequences; pages are reserved.
            cache: holds what came before, and is advanced.
            taps: its keys are blocks; what goes into each of them is put there, ``[tokens, hidden]``.
            x: what goes into the first block, ``[tokens, hidden]``; the embeddings when left out.

        Returns:
            Final hidden states ``[tokens, hidden]``, after the last norm.
        """
        batch = RaggedBatch(spans, cache, taps)
        x = self.embed(ids) if x is None else x
        angles = self._angles(batch.positions, cache)
        entry = BlockInputs(x, batch.slots, angles, batch)
        hidden = self.blocks(entry, cache)[0]
        for span in spans:
            cache.advance(span.row, span.tokens)
        return hidden

    def enter(self, ids: Tensor, cache: CacheRows) -> BlockInputs:
        """Return what blocks need of the next tokens (embeddings, places, angles); advance ``lengths`` of the cache."""
        tokens = ids.shape[1]
        slots = {key: places.flatten() for key, places in cache.slots(tokens).items()}
        positions = cache.lengths[:, None] + torch.arange(tokens, device=ids.device)
        angles = self._angles(positions.flatten(), cache)
        cache.lengths += tokens
        return BlockInputs(self.embed(ids.flatten()), slots, angles)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings ``[tokens, hidden]`` of ``ids`` ``[tokens]``."""
        return _times(self._embedding(ids), self._embedding_factor)

    def _angles(self, positions: Tensor, cache: CacheRows) -> dict[str, tuple[Tensor, Tensor]]:
        keys, most = self._rotary_keys, cache.most_tokens
        return angles_at(self._rotary, keys, positions, most, self.dtype)

    def blocks(self, entry: BlockInputs, cache: CacheRows) -> Tensor:
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
        self, layer: Layer, index: int, h: Tensor, entry: BlockInputs, cache: CacheRows
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

    def _placed(
        self, layer: Layer, q: Tensor, k: Tensor, entry: BlockInputs
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys ``[tokens, heads, head]``, normed and rotated."""
        graph, norms = self._graph, None if self._graph.norms_of_all else layer.head_norms
        if norms is not None and not graph.norms_after_rotation:
            q, k = self._normed(q, norms[0]), self._normed(k, norms[1])
        if layer.rotary is not None:
            if graph.neighbours:
                q, k = (
                    neighbours_to_halves(x, width_of(entry.angles[layer.rotary])) for x in (q, k)
                )
            q = apply_rotary(q, *entry.angles[queries_of(layer.rotary, entry.angles)])
            k = apply_rotary(k, *entry.angles[layer.rotary])
        if norms is not None and graph.norms_after_rotation:
            q, k = self._normed(q, norms[0]), self._normed(k, norms[1])
        return q, k

    def _written(self, update: Tensor, norm: Any) -> Tensor:
        """Return what a half of a block adds to the residuals, of its output."""
        return _times(self._normed(update, norm), self._residual_factor)

    def _add_norm(self, x: Tensor, update: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        if norm is not None and self._epsilon is not None:
            return add_rms_norm(x, update, norm.weight, self._epsilon, self._offset)
        x = x if update is None else x + update
        return (x if norm is None else norm(x)), x

    def _normed(self, x: Tensor, norm: Any) -> Tensor:
        return x if norm is None else self._add_norm(x, None, norm)[0]


def _factor(config: Any, key: str) -> float:
    """Return a factor that the configuration of a family declares; 1 where it has none."""
    return float(getattr(config, key, None) or 1.0)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


@dataclass(frozen=True, slots=True)
class Layer:
    """One block; its modules are those of transformers.

    Attributes:
        attention, mlp: its halves.
        before_attention, after_attention: norms before and after attention, or None.
        before_mlp, after_mlp: likewise of the MLP.
        head_norms: norms of queries and keys, or None.
        scores: how attention makes scores.
        rotary: key of the frequencies, see `rotary`; None: positions do not matter.
        qkv: the projections to queries, keys and values as one; None where they are not joined.
        gate_up: likewise gate and up.
        fused: the projection to queries, keys and values that the family has as one, and how many rows each has in
            turn: of all heads, or of one where they alternate.
    """

    attention: Any
    mlp: Any
    before_attention: Any
    after_attention: Any
    before_mlp: Any
    after_mlp: Any
    head_norms: tuple[Any, Any] | None
    scores: ScoreOptions
    rotary: str | None
    qkv: Joined | None
    gate_up: Joined | None
    fused: tuple[Any, list[int]] | None = None

    def projections(self, h: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of rows ``[tokens, hidden]``."""
        if self.qkv is not None:
            return self.qkv(h)
        if self.fused is not None:
            y, sizes = multiply(self.fused[0], h), self.fused[1]
            parts: tuple[Tensor, ...] = torch.split(y.view(len(h), -1, sum(sizes)), sizes, dim=-1)
            return parts
        module = self.attention
        return tuple(multiply(part, h) for part in (module.q_proj, module.k_proj, module.v_proj))

    def mixed(self, h: Tensor, gate_by: Callable[[Tensor, Tensor], Tensor] | None) -> Tensor:
        """Return the MLP of rows ``[tokens, hidden]``; without ``gate_by`` its own module computes it."""
        module, fused = self.mlp, hasattr(self.mlp, "gate_up_proj")
        if gate_by is None or not (fused or hasattr(module, "gate_proj")):
            y = module(
                h[None]
            )  # mixtures want sequences; of some, the weights of experts come second
            only: Tensor = y[0] if isinstance(y, tuple) else y
            return only.view(h.shape)
        if self.gate_up is not None:
            gate, up = self.gate_up(h)
        elif fused:
            gate, up = multiply(module.gate_up_proj, h).chunk(2, dim=-1)
        else:
            gate, up = (multiply(part, h) for part in (module.gate_proj, module.up_proj))
        return multiply(module.down_proj, gate_by(gate, up))


def layer_of(block: Any, family: Architecture, model: Any, index: int, join: bool) -> Layer:
    """Return block ``index`` of a decoder of transformers; with ``join``, what reads the same is multiplied as one."""
    graph, config = family.own_graph, model.config
    assert graph is not None  # see `decoder_family`
    attention = getattr(block, graph.attention)
    window = getattr(
        attention, "sliding_window", config.sliding_window if graph.one_window else None
    )
    if not getattr(attention, "is_sliding", True):
        window = None
    cap = getattr(config, "attn_logit_softcapping", None) or 0.0
    norms = tuple(_part(attention, name) for name in graph.head_norms)
    return Layer(
        attention=attention,
        mlp=block.mlp,
        before_attention=_part(block, graph.before_attention),
        after_attention=_part(block, graph.after_attention),
        before_mlp=_part(block, graph.before_mlp),
        after_mlp=_part(block, graph.after_mlp),
        head_norms=None if norms[0] is None else (norms[0], norms[1]),
        scores=ScoreOptions(float(attention.scaling), float(cap), window or 0),
        rotary=_rotary(graph, model, attention, index, window),
        qkv=_joined(attention, "q_proj", "k_proj", "v_proj") if join else None,
        gate_up=_joined(block.mlp, "gate_proj", "up_proj") if join else None,
        fused=_fused(family, graph, config, attention) if graph.fused else None,
    )


def _part(module: Any, name: str) -> Any:
    return getattr(module, name, None) if name else None


def _fused(
    family: Architecture, graph: DecoderGraph, config: Any, attention: Any
) -> tuple[Any, list[int]]:
    sizes = family.dimensions(config.to_dict())
    module = getattr(attention, graph.fused)
    rows = [sizes.size(text) for text in family.slices[f"{graph.attention}.{graph.fused}"]]
    held = len(module.weight)  # fewer than of all heads, where processes share them
    return module, [size * min(held, sum(rows)) // sum(rows) for size in rows]


def _rotary(
    graph: DecoderGraph, model: Any, attention: Any, index: int, window: int | None
) -> str | None:
    """Return the key of the frequencies of a layer."""
    config = model.config
    if hasattr(model.base_model.rotary_emb, "layer_types"):  # frequencies by type of layer
        return str(config.layer_types[index])
    if not getattr(attention, "use_rope", True):
        return None
    full = {
        "always": True,
        "never": False,
        "alone": getattr(config, "sliding_window", None) is None,
    }
    return "" if window or full[graph.full_rotary] else None


def neighbours_to_halves(x: Tensor, width: int) -> Tensor:
    """Reorder the first ``width`` of the last dimension: those at even places before those at odd ones.

    Rotating neighbours is then rotating halves. Queries and keys are reordered alike, so that their products are what
    they were.
    """
    return torch.cat((x[..., 0:width:2], x[..., 1:width:2], x[..., width:]), -1)


class Joined:
    """Some linear layers as one.

    Args:
        parts: see `joinable`.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        biases = [part.bias for part in parts]
        self._bias = None
        if biases[0] is not None:
            self._bias = torch.cat([bias for bias in biases if isinstance(bias, Tensor)])
        self._weight: Tensor | None = None  # of dense layers; packed ones have `_packed`
        packed = [part for part in parts if isinstance(part, PackedLinear)]
        if packed:
            self._sizes = [part.problem.out_features for part in packed]
            self._problem = replace(packed[0].problem, out_features=sum(self._sizes))
            self._kernel = packed[0].chosen
            self._packed = {name: _together(packed, name) for name in packed[0].packed}
        else:
            self._sizes = [len(_weight(part)) for part in parts]
            self._weight = torch.cat([_weight(part) for part in parts])
            for part, rows in zip(parts, torch.split(self._weight, self._sizes), strict=True):
                part.weight = nn.Parameter(rows, requires_grad=False)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Multiply ``x`` ``[rows, in]``; return ``[rows, out]`` of each part."""
        if self._weight is not None:
            y = linear(x, self._weight, self._bias)
        else:
            y = self._kernel.matmul(x, self._packed, self._problem)
            y = y if self._bias is None else add_bias(y, self._bias)
        parts: tuple[Tensor, ...] = torch.split(y, self._sizes, dim=-1)
        return parts


def joinable(parts: Sequence[nn.Module]) -> bool:
    """Return whether the layers can be one: dense ones, or packed ones in one layout of rows."""
    if len({getattr(part, "bias", None) is None for part in parts}) > 1:
        return False
    if all(isinstance(part, nn.Linear) for part in parts):
        return True
    packed = [part for part in parts if isinstance(part, PackedLinear)]
    if len(packed) < len(parts):
        return False
    problems = {replace(part.problem, out_features=0) for part in packed}
    names = {tuple(part.packed) for part in packed}
    apart = max(packed[0].chosen.row_alignment, packed[0].problem.tile_rows)
    whole = all(part.problem.out_features % apart == 0 for part in packed)
    plain = all(part.takes_plain_input for part in packed)
    return len(problems) == len(names) == 1 and whole and plain


def _joined(module: Any, *names: str) -> Joined | None:
    if not all(hasattr(module, name) for name in names):  # the family has them as one, or no gate
        return None
    parts = [getattr(module, name) for name in names]
    return Joined(parts) if joinable(parts) else None


def _together(parts: Sequence[PackedLinear], name: str) -> Tensor:
    """Join the packed weights of all parts to one tensor; the parts become views of it."""
    given = [part.packed[name] for part in parts]
    if name in SHARED:
        return given[0]
    whole = torch.cat(given)
    sizes = [len(value) for value in given]
    for part, rows in zip(parts, torch.split(whole, sizes), strict=True):
        part.register_buffer(name, rows)
    return whole


def _weight(part: nn.Module) -> Tensor:
    weight = part.weight
    assert isinstance(weight, Tensor)
    return weight
