"""A decoder for many model families in one file, computing on packed weights and a paged KV cache.

A block computes, with residuals ``x``:

    h = norm?(x);  q, k, v = split(h W_qkv);  q, k = rotate(norm?(q), norm?(k), positions)
    x += norm?(attention(q, k, v) W_o)
    h = norm?(x);  x += norm?((act(h W_gate) * (h W_up)) W_down)

Families differ only in data (`quantforge.architectures.decoder_graph`): norms before or after attention and MLP, or
both; norms that multiply by ``1 + w`` (gemma); norms of q and k per head or over all heads (olmo2), before or after the
rotation (hunyuan); biases, fused projections, logit soft caps, sliding windows, two rotary bases (gemma3), layers
without rotary positions (smollm3, cohere2), interleaved instead of half rotation (glm), attention and MLP in parallel
(cohere), multipliers (granite). Norms other than RMSNorm and MLPs without a gate are computed by the modules of
transformers. Weights, rotary frequencies and configuration are those that `load` put into the transformers model; a
test compares the logits with transformers for every family. Few kernels are launched per step: on a GPU, norm with
residual, rotary and gate are one kernel each (`quantforge_kernels.layers`), and attention reads the cache as stored.
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
from quantforge.runtime.linear import PackedLinear, apply_linear, tensor_parallel_size
from quantforge.runtime.packed_experts import needs_host_sync
from quantforge.runtime.ragged_attention import RaggedBatch, Span, Taps, attend_batch
from quantforge.runtime.rotary import (
    SUPPORTED_ROPE_TYPES,
    query_angles_key,
    rope_types,
    rotary_angles,
    rotary_width,
)
from quantforge_kernels.attention import attend
from quantforge_kernels.layers import (
    add_bias,
    add_rms_norm,
    apply_rotary,
    gelu_gate,
    linear,
    silu_gate,
)
from quantforge_kernels.score_options import ScoreOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

SHARED_PARAMETERS = frozenset({"table"})  # parameters that all rows share: the codebook


def supports(model: PreTrainedModel) -> bool:
    """Return whether `Decoder` can run this model."""
    inner: Any = model.base_model
    family = decoder_family(model.config.model_type)
    return family is not None and set(rope_types(inner.rotary_emb)) <= SUPPORTED_ROPE_TYPES


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """Inputs of the decoder blocks for the next tokens.

    Attributes:
        x: embeddings ``[tokens of all sequences, hidden]``.
        slots: cache slots of the tokens, by page table of a layer (`CacheLayout.table_keys`).
        angles: cosines and sines by rotary key, see `DecoderLayer.rotary`.
        ragged: batch of spans of different lengths; None if every sequence of the cache has equally many new tokens.
    """

    x: Tensor
    slots: dict[int, Tensor]
    angles: dict[str, tuple[Tensor, Tensor]]
    ragged: RaggedBatch | None = None

    def store_tap(self, block: int, x: Tensor) -> None:
        """Store the input ``[tokens, hidden]`` of a block in the taps if it was requested there."""
        if self.ragged is not None and self.ragged.taps and block in self.ragged.taps:
            self.ragged.taps[block] = x

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in a fixed order."""
        return [
            self.x,
            *(self.slots[key] for key in sorted(self.slots)),
            *(tensor for key in sorted(self.angles) for tensor in self.angles[key]),
        ]


class Decoder:
    """Decoder-only forward pass over the modules of a loaded model.

    Args:
        model: the loaded model; its modules are used, not copied.
        join: fuse linears that have the same input (q, k, v; gate, up) into one matrix product.
        scales: calibrated scales of keys and values by layer, for fp8 caches.

    Attributes:
        positions: maximum sequence length in tokens.
        vocabulary: number of tokens in the vocabulary.
        needs_host_sync: the host must synchronize within a step (expert routing, tensor parallelism), so that no CUDA
            graph can be captured.

    Raises:
        RefusedError: the model family or its rotary type is not supported.
    """

    def __init__(
        self, model: PreTrainedModel, join: bool = True, scales: LayerScales | None = None
    ) -> None:
        family = decoder_family(model.config.model_type)
        if family is None or family.graph_if_complete is None or not supports(model):
            raise RefusedError(
                f"model_type {model.config.model_type!r} is not computed by the own decoder",
                "such models run through transformers",
            )
        config: Any = model.config
        inner: Any = model.base_model
        sizes = family.dimensions(config.to_dict())
        ranks = tensor_parallel_size(model)
        self.kv_heads, self.head = sizes.kv_heads // ranks, sizes.head
        self._embedding: Any = model.get_submodule(family.embedding)
        self.dtype: torch.dtype = self._embedding.weight.dtype
        self.device: torch.device = self._embedding.weight.device
        self.positions: int = config.max_position_embeddings
        self.vocabulary = len(self._embedding.weight)
        self._output: nn.Module = model.get_output_embeddings()
        self._graph = family.graph_if_complete
        self._norm: Any = model.get_submodule(family.final_norm)
        self._epsilon: float | None = getattr(config, "rms_norm_eps", None)  # None: not RMSNorm
        self._offset = family.norm_offset
        self._embedding_factor = _config_multiplier(config, "embedding_multiplier")
        self._residual_factor = _config_multiplier(config, "residual_multiplier")
        self._logit_factor = _config_multiplier(config, "logit_scale") / _config_multiplier(
            config, "logits_scaling"
        )
        self._final_softcap: float = getattr(config, "final_logit_softcapping", None) or 0.0
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        self._gate = {"silu": silu_gate, "gelu_pytorch_tanh": gelu_gate}.get(activation)
        parallel = self._graph.parallel_mlp
        self._parallel_blocks = bool(
            getattr(config, parallel) if isinstance(parallel, str) else parallel
        )
        self._rotary = inner.rotary_emb
        self._scales = scales
        blocks: Any = model.get_submodule(family.blocks)
        self.layers = [
            build_layer(block, family, model, index, join) for index, block in enumerate(blocks)
        ]
        self.needs_host_sync = needs_host_sync(model) or ranks > 1
        self._rotary_keys = sorted({x.rotary for x in self.layers if x.rotary is not None})

    def cache(
        self,
        sequences: int,
        tokens: int,
        kind: str = "",
        pages: int | None = None,
        max_step_tokens: int = 0,
    ) -> PagedCache:
        """Allocate a KV cache for ``sequences`` sequences of at most ``tokens`` tokens each.

        Raises as `CacheShape` and `PagedCache` do.
        """
        shape = self.cache_shape(kind)
        return PagedCache(
            shape, sequences, tokens, self.device, pages, self._scales, max_step_tokens
        )

    def cache_shape(self, kind: str = "") -> CacheShape:
        """Return the shape and type of the cache entries of this model."""
        windows = tuple(layer.scores.window for layer in self.layers)
        return CacheShape(len(self.layers), self.kv_heads, self.head, kind, self.dtype, windows)

    def hidden(self, ids: Tensor, cache: CacheRows) -> Tensor:
        """Run the model on the next tokens of every sequence and append their keys and values to the cache.

        The caller must update the host's token counts with ``cache.advance_all``.

        Args:
            ids: token ids ``[sequences, tokens]``; their cache pages must be reserved.
            cache: KV cache with the tokens before them.

        Returns:
            Final hidden states ``[sequences, tokens, hidden]``, after the last norm.
        """
        return self.run_blocks(self.prepare_inputs(ids, cache), cache)

    def hidden_of_spans(
        self,
        ids: Tensor,
        spans: Sequence[Span],
        cache: PagedCache,
        taps: Taps = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """Run the model on spans of new tokens of some sequences and append their keys and values to the cache.

        Args:
            ids: token ids ``[tokens]`` of all spans, concatenated.
            spans: spans of different sequences; their cache pages must be reserved.
            cache: KV cache with the tokens before them; its lengths are advanced.
            taps: dictionary whose keys are block numbers; filled with the inputs ``[tokens, hidden]`` of these blocks.
            x: inputs of the first block, ``[tokens, hidden]``; the token embeddings by default.

        Returns:
            Final hidden states ``[tokens, hidden]``, after the last norm.
        """
        batch = RaggedBatch(spans, cache, taps)
        x = self.embed(ids) if x is None else x
        angles = self._angles(batch.positions, cache)
        entry = BlockInputs(x, batch.slots, angles, batch)
        hidden = self.run_blocks(entry, cache)[0]
        for span in spans:
            cache.advance(span.row, span.tokens)
        return hidden

    def prepare_inputs(self, ids: Tensor, cache: CacheRows) -> BlockInputs:
        """Return the inputs of the blocks (embeddings, cache slots, rotary angles); advance the cache ``lengths``."""
        tokens = ids.shape[1]
        slots = {key: slot_indices.flatten() for key, slot_indices in cache.slots(tokens).items()}
        positions = cache.lengths[:, None] + torch.arange(tokens, device=ids.device)
        angles = self._angles(positions.flatten(), cache)
        cache.lengths += tokens
        return BlockInputs(self.embed(ids.flatten()), slots, angles)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings ``[tokens, hidden]`` of ``ids`` ``[tokens]``."""
        return _scaled(self._embedding(ids), self._embedding_factor)

    def _angles(self, positions: Tensor, cache: CacheRows) -> dict[str, tuple[Tensor, Tensor]]:
        keys, max_tokens = self._rotary_keys, cache.max_tokens
        return rotary_angles(self._rotary, keys, positions, max_tokens, self.dtype)

    def run_blocks(self, entry: BlockInputs, cache: CacheRows) -> Tensor:
        """Run all blocks and the last norm; the spans of a ragged batch count as one sequence in the result."""
        x, update, sequences = entry.x, None, 1 if entry.ragged else cache.sequences
        for index, layer in enumerate(self.layers):
            h, x = self._add_norm(x, update, layer.before_attention)
            entry.store_tap(index, x)
            update = self._attention(layer, index, h, entry, cache)
            update = self._residual_update(update, layer.after_attention)
            if self._parallel_blocks:
                if layer.before_mlp is not None:
                    h = self._normed(x, layer.before_mlp)
                update = update + self._residual_update(
                    layer.mlp_output(h, self._gate), layer.after_mlp
                )
            else:
                h, x = self._add_norm(x, update, layer.before_mlp)
                update = self._residual_update(layer.mlp_output(h, self._gate), layer.after_mlp)
        h, _ = self._add_norm(x, update, self._norm)
        return h.view(sequences, len(h) // sequences, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head to hidden states ``[..., hidden]``; return logits ``[..., vocabulary]`` in float32."""
        logits = _scaled(apply_linear(self._output, hidden), self._logit_factor)
        if self._final_softcap:
            logits = torch.tanh(logits / self._final_softcap) * self._final_softcap
        return logits.float()

    def _attention(
        self, layer: DecoderLayer, index: int, h: Tensor, entry: BlockInputs, cache: CacheRows
    ) -> Tensor:
        module, sequences = layer.attention, cache.sequences
        q, k, v = layer.projections(h)
        if layer.head_norms is not None and self._graph.qk_norms_over_all_heads:
            q, k = (self._normed(x, norm) for x, norm in zip((q, k), layer.head_norms, strict=True))
        q, k, v = (tensor.view(len(h), -1, self.head) for tensor in (q, k, v))
        q, k = self._apply_head_norms_and_rotary(layer, q, k, entry)
        cache.write(index, entry.slots[cache.table_keys[index]], k, v)
        if entry.ragged is not None:
            out = entry.ragged.attend(q, index, cache, layer.scores)
        elif len(h) == sequences:
            layer_stores, table = cache.layers[index], cache.table_of(index)
            out = attend(q, *layer_stores, table, cache.lengths, layer.scores)
        else:
            batched_q = q.view(sequences, -1, *q.shape[1:])
            out = attend_batch(batched_q, index, cache, layer.scores)
        return apply_linear(getattr(module, self._graph.output_proj), out.reshape(len(h), -1))

    def _apply_head_norms_and_rotary(
        self, layer: DecoderLayer, q: Tensor, k: Tensor, entry: BlockInputs
    ) -> tuple[Tensor, Tensor]:
        """Apply per-head norms and rotary positions to queries and keys ``[tokens, heads, head]``."""
        graph, norms = (
            self._graph,
            None if self._graph.qk_norms_over_all_heads else layer.head_norms,
        )
        if norms is not None and not graph.qk_norms_after_rotation:
            q, k = self._normed(q, norms[0]), self._normed(k, norms[1])
        if layer.rotary is not None:
            if graph.interleaved_rotary:
                q, k = (
                    interleaved_to_halves(x, rotary_width(entry.angles[layer.rotary]))
                    for x in (q, k)
                )
            q = apply_rotary(q, *entry.angles[query_angles_key(layer.rotary, entry.angles)])
            k = apply_rotary(k, *entry.angles[layer.rotary])
        if norms is not None and graph.qk_norms_after_rotation:
            q, k = self._normed(q, norms[0]), self._normed(k, norms[1])
        return q, k

    def _residual_update(self, update: Tensor, norm: Any) -> Tensor:
        """Return the residual update for the output of attention or MLP: normed and multiplied, as the family does."""
        return _scaled(self._normed(update, norm), self._residual_factor)

    def _add_norm(self, x: Tensor, update: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        if norm is not None and self._epsilon is not None:
            return add_rms_norm(x, update, norm.weight, self._epsilon, self._offset)
        x = x if update is None else x + update
        return (x if norm is None else norm(x)), x

    def _normed(self, x: Tensor, norm: Any) -> Tensor:
        return x if norm is None else self._add_norm(x, None, norm)[0]


def _config_multiplier(config: Any, key: str) -> float:
    """Return a multiplier from the model configuration; 1 if it is not set."""
    return float(getattr(config, key, None) or 1.0)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder block: the transformers modules it consists of, and how they are combined.

    Attributes:
        attention, mlp: the attention and MLP modules.
        before_attention, after_attention: norms before and after attention, or None.
        before_mlp, after_mlp: norms before and after the MLP, or None.
        head_norms: norms of queries and keys, or None.
        scores: scale, soft cap and window of the attention scores.
        rotary: key of the rotary frequencies, see `quantforge.runtime.rotary`; None without rotary positions.
        qkv: the query, key and value projections joined to one product; None if they are not joined.
        gate_up: the gate and up projections joined to one product; None if they are not joined.
        fused: the fused qkv projection of families that store one, with the row counts of q, k and v: of all heads, or
            of one group where they are interleaved.
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
    qkv: JoinedLinears | None
    gate_up: JoinedLinears | None
    fused: tuple[Any, list[int]] | None = None

    def projections(self, h: Tensor) -> tuple[Tensor, ...]:
        """Project rows ``[tokens, hidden]`` to queries, keys and values."""
        if self.qkv is not None:
            return self.qkv(h)
        if self.fused is not None:
            y, sizes = apply_linear(self.fused[0], h), self.fused[1]
            outputs: tuple[Tensor, ...] = torch.split(y.view(len(h), -1, sum(sizes)), sizes, dim=-1)
            return outputs
        module = self.attention
        return tuple(
            apply_linear(projection, h)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )

    def mlp_output(
        self, h: Tensor, gate_activation: Callable[[Tensor, Tensor], Tensor] | None
    ) -> Tensor:
        """Apply the MLP to rows ``[tokens, hidden]``; if ``gate_activation`` is None, its transformers module runs."""
        module, fused = self.mlp, hasattr(self.mlp, "gate_up_proj")
        if gate_activation is None or not (fused or hasattr(module, "gate_proj")):
            # Mixtures of experts expect sequences; some also return the router weights.
            y = module(h[None])
            output: Tensor = y[0] if isinstance(y, tuple) else y
            return output.view(h.shape)
        if self.gate_up is not None:
            gate, up = self.gate_up(h)
        elif fused:
            gate, up = apply_linear(module.gate_up_proj, h).chunk(2, dim=-1)
        else:
            gate, up = (
                apply_linear(projection, h) for projection in (module.gate_proj, module.up_proj)
            )
        return apply_linear(module.down_proj, gate_activation(gate, up))


def build_layer(
    block: Any, family: Architecture, model: Any, index: int, join: bool
) -> DecoderLayer:
    """Build the `DecoderLayer` of a transformers block; ``join`` fuses linears that have the same input."""
    graph, config = family.graph_if_complete, model.config
    assert graph is not None  # see `decoder_family`
    attention = getattr(block, graph.attention_module)
    window = getattr(
        attention, "sliding_window", config.sliding_window if graph.same_window else None
    )
    if not getattr(attention, "is_sliding", True):
        window = None
    softcap = getattr(config, "attn_logit_softcapping", None) or 0.0
    norms = tuple(_optional_submodule(attention, name) for name in graph.head_norms)
    return DecoderLayer(
        attention=attention,
        mlp=block.mlp,
        before_attention=_optional_submodule(block, graph.norm_before_attention),
        after_attention=_optional_submodule(block, graph.norm_after_attention),
        before_mlp=_optional_submodule(block, graph.norm_before_mlp),
        after_mlp=_optional_submodule(block, graph.norm_after_mlp),
        head_norms=None if norms[0] is None else (norms[0], norms[1]),
        scores=ScoreOptions(float(attention.scaling), float(softcap), window or 0),
        rotary=_rotary_key(graph, model, attention, index, window),
        qkv=_join_linears(attention, "q_proj", "k_proj", "v_proj") if join else None,
        gate_up=_join_linears(block.mlp, "gate_proj", "up_proj") if join else None,
        fused=_fused_qkv(family, graph, config, attention) if graph.fused_qkv else None,
    )


def _optional_submodule(module: Any, name: str) -> Any:
    return getattr(module, name, None) if name else None


def _fused_qkv(
    family: Architecture, graph: DecoderGraph, config: Any, attention: Any
) -> tuple[Any, list[int]]:
    sizes = family.dimensions(config.to_dict())
    module = getattr(attention, graph.fused_qkv)
    rows = [
        sizes.size(text) for text in family.slices[f"{graph.attention_module}.{graph.fused_qkv}"]
    ]
    held_rows = len(module.weight)  # fewer rows under tensor parallelism
    return module, [size * min(held_rows, sum(rows)) // sum(rows) for size in rows]


def _rotary_key(
    graph: DecoderGraph, model: Any, attention: Any, index: int, window: int | None
) -> str | None:
    """Return the key of the rotary frequencies of a layer; None if it has no rotary positions."""
    config = model.config
    if hasattr(model.base_model.rotary_emb, "layer_types"):  # frequencies by type of layer
        return str(config.layer_types[index])
    if not getattr(attention, "use_rope", True):
        return None
    rotary_on_full_layers = {
        "always": True,
        "never": False,
        "alone": getattr(config, "sliding_window", None) is None,
    }
    return "" if window or rotary_on_full_layers[graph.full_rotary] else None


def interleaved_to_halves(x: Tensor, width: int) -> Tensor:
    """Permute the first ``width`` channels of the last dimension: even channels first, then odd ones.

    This turns interleaved rotary embedding into the half-split form. Queries and keys are permuted alike, so their
    products do not change.
    """
    return torch.cat((x[..., 0:width:2], x[..., 1:width:2], x[..., width:]), -1)


class JoinedLinears:
    """Several linear layers with the same input, computed as one matrix product.

    Args:
        parts: the linear layers; `can_join` must hold for them.
    """

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        biases = [module.bias for module in linears]
        self._bias = None
        if biases[0] is not None:
            self._bias = torch.cat([bias for bias in biases if isinstance(bias, Tensor)])
        self._weight: Tensor | None = None  # of dense layers; packed ones have `_packed`
        packed = [module for module in linears if isinstance(module, PackedLinear)]
        if packed:
            self._sizes = [module.problem.out_features for module in packed]
            self._problem = replace(packed[0].problem, out_features=sum(self._sizes))
            self._kernel = packed[0].chosen
            self._packed = {name: _join_packed(packed, name) for name in packed[0].packed}
        else:
            self._sizes = [len(_weight_tensor(module)) for module in linears]
            self._weight = torch.cat([_weight_tensor(module) for module in linears])
            for module, rows in zip(linears, torch.split(self._weight, self._sizes), strict=True):
                module.weight = nn.Parameter(rows, requires_grad=False)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Multiply ``x`` ``[rows, in]``; return the output ``[rows, out]`` of each part."""
        if self._weight is not None:
            y = linear(x, self._weight, self._bias)
        else:
            y = self._kernel.matmul(x, self._packed, self._problem)
            y = y if self._bias is None else add_bias(y, self._bias)
        outputs: tuple[Tensor, ...] = torch.split(y, self._sizes, dim=-1)
        return outputs


def can_join(linears: Sequence[nn.Module]) -> bool:
    """Return whether linear layers can be joined: all dense, or all packed with the same kernel and row layout."""
    if len({getattr(module, "bias", None) is None for module in linears}) > 1:
        return False
    if all(isinstance(module, nn.Linear) for module in linears):
        return True
    packed = [module for module in linears if isinstance(module, PackedLinear)]
    if len(packed) < len(linears):
        return False
    problems = {replace(module.problem, out_features=0) for module in packed}
    names = {tuple(module.packed) for module in packed}
    row_multiple = max(packed[0].chosen.row_alignment, packed[0].problem.tile_rows)
    is_aligned = all(module.problem.out_features % row_multiple == 0 for module in packed)
    all_plain = all(module.takes_plain_input for module in packed)
    return len(problems) == len(names) == 1 and is_aligned and all_plain


def _join_linears(module: Any, *names: str) -> JoinedLinears | None:
    if not all(hasattr(module, name) for name in names):  # the family has them as one, or no gate
        return None
    linears = [getattr(module, name) for name in names]
    return JoinedLinears(linears) if can_join(linears) else None


def _join_packed(linears: Sequence[PackedLinear], name: str) -> Tensor:
    """Concatenate a packed tensor of all parts; the buffers of the parts become views of the result."""
    tensors = [module.packed[name] for module in linears]
    if name in SHARED_PARAMETERS:
        return tensors[0]
    joined = torch.cat(tensors)
    sizes = [len(value) for value in tensors]
    for module, rows in zip(linears, torch.split(joined, sizes), strict=True):
        module.register_buffer(name, rows)
    return joined


def _weight_tensor(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight
