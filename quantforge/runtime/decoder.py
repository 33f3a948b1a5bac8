"""One readable decoder for the llama-like families, on packed weights and a paged cache.

A block computes, with residuals ``x``:

    h = norm(x);  q, k, v = split(h W_qkv);  q, k = rotate(norm?(q), norm?(k), positions)
    x += norm?(attention(q, k, v) W_o)
    h = norm(x);  x += norm?((act(h W_gate) * (h W_up)) W_down)

The families differ in data only: norms that multiply by ``1 + w`` and stand after each half as well
(gemma), norms over the heads of q and k (qwen3, gemma3), biases (qwen2), fused projections (phi3),
soft caps (gemma2), sliding windows, two rotary bases (gemma3), layers without rotary (smollm3).
Weights, rotary frequencies and configuration are those that `load` put into the skeleton of
transformers; the logits are those of transformers, which a test holds for every family.

The launches of a step are few: norm with residual, rotary and gate are one kernel each on a GPU
(`quantforge_kernels.layers`), and attention reads the cache in its stored form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantforge.errors import RefusedError
from quantforge.runtime.cache import CacheShape, LayerScales, PagedCache
from quantforge.runtime.decoder_layer import Layer, layer_of
from quantforge.runtime.prompt_attention import attend_many
from quantforge.runtime.rotary import angles_at, kinds_of
from quantforge_kernels.attention import attend
from quantforge_kernels.layers import add_norm, gelu_gate, linear, rotate, silu_gate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3"}
)
_PLUS_ONE = frozenset({"gemma2", "gemma3_text"})  # norms store w of 1 + w
_STATIC_ROTARY = frozenset({"default", "linear", "llama3", "yarn", "longrope"})


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Tokens on their way into the blocks.

    Attributes:
        x: embeddings ``[tokens of all sequences, hidden]``.
        slots: places of the tokens in the cache.
        angles: cosines and sines by kind of rotary, see `Layer.rotary`.
    """

    x: Tensor
    slots: Tensor
    angles: dict[str, tuple[Tensor, Tensor]]

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in one order."""
        return [
            self.x,
            self.slots,
            *(part for key in sorted(self.angles) for part in self.angles[key]),
        ]


def supports(model: PreTrainedModel) -> bool:
    """Return whether `Decoder` computes this model."""
    config: Any = model.config
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "")
    return (
        config.model_type in FAMILIES
        and activation in {"silu", "gelu_pytorch_tanh"}
        and set(kinds_of(model.model.rotary_emb)) <= _STATIC_ROTARY
    )


class Decoder:
    """A model that was loaded, computed by this module.

    Args:
        model: its modules are used, not copied.
        join: multiply layers with the same input as one.
        scales: by layer, measured scales of keys and values, for caches in fp8.

    Raises:
        RefusedError: a family, an activation function or a kind of rotary that is not computed here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        join: bool = True,
        scales: LayerScales | None = None,
    ) -> None:
        if not supports(model):
            raise RefusedError(
                f"model_type {model.config.model_type!r} is not computed by the own decoder",
                f"known: {', '.join(sorted(FAMILIES))}; others run through transformers",
            )
        config: Any = model.config
        inner: Any = model.model
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.dtype: torch.dtype = inner.norm.weight.dtype
        self.device: torch.device = inner.norm.weight.device
        self.positions: int = config.max_position_embeddings
        self._embedding: nn.Module = inner.embed_tokens
        self._output: nn.Module = model.get_output_embeddings()
        self._norm = inner.norm.weight
        self._epsilon: float = config.rms_norm_eps
        self._offset = 1.0 if config.model_type in _PLUS_ONE else 0.0
        self._final_cap: float = getattr(config, "final_logit_softcapping", None) or 0.0
        self._silu = (getattr(config, "hidden_activation", None) or config.hidden_act) == "silu"
        self._rotary = inner.rotary_emb
        self._scales = scales
        self.layers = [layer_of(inner, config, i, join) for i in range(len(inner.layers))]
        keys = {layer.rotary for layer in self.layers}
        self._rotary_keys = sorted(key for key in keys if key is not None)

    def cache(self, sequences: int, tokens: int, kind: str = "") -> PagedCache:
        """Make a cache for some sequences of at most ``tokens`` tokens."""
        return PagedCache(
            self.cache_shape(kind), sequences, tokens, self.device, scales=self._scales
        )

    def cache_shape(self, kind: str = "") -> CacheShape:
        """Return the shape of a cache of this model."""
        return CacheShape(len(self.layers), self.kv_heads, self.head, kind, self.dtype)

    def hidden(self, ids: Tensor, cache: PagedCache) -> Tensor:
        """Compute the next tokens of every sequence, and append them to the cache.

        Args:
            ids: ``[sequences, tokens]``; pages are reserved.
            cache: holds what came before.

        Returns:
            Final hidden states ``[sequences, tokens, hidden]``, after the last norm.
        """
        return self.blocks(self.enter(ids, cache), cache)

    def enter(self, ids: Tensor, cache: PagedCache) -> Arrivals:
        """Return what blocks need of the next tokens (embeddings, places, angles); the cache counts them."""
        tokens = ids.shape[1]
        slots = cache.slots(tokens).flatten()
        positions = cache.lengths[:, None] + torch.arange(tokens, device=ids.device)
        angles = angles_at(
            self._rotary, self._rotary_keys, positions.flatten(), cache.most_tokens, self.dtype
        )
        cache.lengths += tokens
        return Arrivals(self._embedding(ids.flatten()), slots, angles)

    def blocks(self, entry: Arrivals, cache: PagedCache) -> Tensor:
        """Compute all blocks and the last norm; see `hidden`."""
        x, sequences = entry.x, cache.sequences
        update: Tensor | None = None
        for index, layer in enumerate(self.layers):
            block = layer.block
            h, x = self._add_norm(x, update, block.input_layernorm)
            update = self._attention(layer, index, h, entry, cache)
            if hasattr(block, "pre_feedforward_layernorm"):  # gemma: a norm after each half, too
                update = self._normed(update, block.post_attention_layernorm)
                h, x = self._add_norm(x, update, block.pre_feedforward_layernorm)
                update = self._normed(self._mlp(layer, h), block.post_feedforward_layernorm)
            else:
                h, x = self._add_norm(x, update, block.post_attention_layernorm)
                update = self._mlp(layer, h)
        h, _ = add_norm(x, update, self._norm, self._epsilon, self._offset)
        return h.view(sequences, len(h) // sequences, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., vocabulary]`` in float32."""
        logits = _multiply(self._output, hidden)
        if self._final_cap:
            logits = torch.tanh(logits / self._final_cap) * self._final_cap
        return logits.float()

    def _attention(
        self, layer: Layer, index: int, h: Tensor, entry: Arrivals, cache: PagedCache
    ) -> Tensor:
        module, sequences = layer.block.self_attn, cache.sequences
        q, k, v = (part.view(len(h), -1, self.head) for part in self._projections(layer, h))
        if hasattr(module, "q_norm"):
            q, k = self._normed(q, module.q_norm), self._normed(k, module.k_norm)
        if layer.rotary is not None:
            q, k = (rotate(part, *entry.angles[layer.rotary]) for part in (q, k))
        cache.write(index, entry.slots, k, v)
        tokens = len(h) // sequences
        if tokens == 1:
            stores, kind = cache.layers[index], cache.shape.kind
            out = attend(q, *stores, kind, cache.table, cache.lengths, layer.scores)
        else:
            out = attend_many(q.view(sequences, tokens, -1, self.head), index, cache, layer.scores)
        return _multiply(module.o_proj, out.reshape(len(h), -1))

    def _projections(self, layer: Layer, h: Tensor) -> tuple[Tensor, ...]:
        module = layer.block.self_attn
        if layer.qkv is not None:
            return layer.qkv(h)
        if hasattr(module, "qkv_proj"):
            q, kv = self.heads * self.head, self.kv_heads * self.head
            parts: tuple[Tensor, ...] = torch.split(
                _multiply(module.qkv_proj, h), [q, kv, kv], dim=-1
            )
            return parts
        return tuple(_multiply(part, h) for part in (module.q_proj, module.k_proj, module.v_proj))

    def _mlp(self, layer: Layer, h: Tensor) -> Tensor:
        module = layer.block.mlp
        if layer.gate_up is not None:
            gate, up = layer.gate_up(h)
        elif hasattr(module, "gate_up_proj"):
            gate, up = _multiply(module.gate_up_proj, h).chunk(2, dim=-1)
        else:
            gate, up = (_multiply(part, h) for part in (module.gate_proj, module.up_proj))
        inner = silu_gate(gate, up) if self._silu else gelu_gate(gate, up)
        return _multiply(module.down_proj, inner)

    def _add_norm(self, x: Tensor, update: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        return add_norm(x, update, norm.weight, self._epsilon, self._offset)

    def _normed(self, x: Tensor, norm: Any) -> Tensor:
        return self._add_norm(x, None, norm)[0]


def _multiply(module: nn.Module, x: Tensor) -> Tensor:
    """Multiply rows by a layer, packed or not."""
    if type(module) is nn.Linear:
        return linear(x, module.weight, module.bias)
    y: Tensor = module(x)
    return y
