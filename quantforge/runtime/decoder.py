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
from torch.nn.functional import scaled_dot_product_attention

from quantforge.errors import RefusedError
from quantforge.runtime.cache import CacheShape, LayerScales, PagedCache
from quantforge.runtime.joined import Joined, joinable
from quantforge_kernels.attention import Scores, attend
from quantforge_kernels.cpu import many_rows
from quantforge_kernels.kv import PAGE
from quantforge_kernels.layers import add_norm, gelu_gate, linear, rotate, silu_gate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3"}
)
_PLUS_ONE = frozenset({"gemma2", "gemma3_text"})  # norms store w of 1 + w
_ONE_WINDOW = frozenset({"mistral", "phi3"})  # the configuration's window holds for every layer
_STATIC_ROTARY = frozenset({"default", "linear", "llama3", "yarn", "longrope"})


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: its modules, and what differs from block to block."""

    block: Any
    scores: Scores
    rotary: str | None  # key of the frequencies; None: positions do not matter
    qkv: Joined | None = None
    gate_up: Joined | None = None


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
        and set(_rotary_types(model.model.rotary_emb)) <= _STATIC_ROTARY
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
        self._join = join
        self.layers = [self._layer(block, config, i) for i, block in enumerate(inner.layers)]

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
        """Find places for the next tokens, and what the blocks need of them; the cache counts them."""
        tokens = ids.shape[1]
        slots = cache.slots(tokens).flatten()
        positions = cache.lengths[:, None] + torch.arange(tokens, device=ids.device)
        angles = self._angles(positions.flatten(), cache.most_tokens)
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

    def _layer(self, block: Any, config: Any, index: int) -> Layer:
        attention = block.self_attn
        window = getattr(attention, "sliding_window", None)
        if config.model_type in _ONE_WINDOW:
            window = config.sliding_window
        rotary: str | None = ""
        if hasattr(self._rotary, "layer_types"):  # frequencies by type of layer
            rotary = config.layer_types[index]
        elif not getattr(attention, "use_rope", True):
            rotary = None
        cap = getattr(config, "attn_logit_softcapping", None) or 0.0
        scores = Scores(float(attention.scaling), float(cap), window or 0)
        qkv = self._joined(attention, "q_proj", "k_proj", "v_proj")
        return Layer(block, scores, rotary, qkv, self._joined(block.mlp, "gate_proj", "up_proj"))

    def _joined(self, module: Any, *names: str) -> Joined | None:
        if not self._join or not hasattr(module, names[0]):
            return None
        parts = [getattr(module, name) for name in names]
        return Joined(parts) if joinable(parts) else None

    def _angles(self, positions: Tensor, most: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Return cosines and sines ``[tokens, rotary / 2]`` of each set of frequencies that is in use."""
        found = {}
        for key in {layer.rotary for layer in self.layers} - {None}:
            assert key is not None
            frequencies, scale = _frequencies(self._rotary, key, most)
            angles = positions[:, None].float() * frequencies.to(positions.device)
            found[key] = (
                (angles.cos() * scale).to(self.dtype),
                (angles.sin() * scale).to(self.dtype),
            )
        return found

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
            out = _attend_many(q.view(sequences, tokens, -1, self.head), index, cache, layer.scores)
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


def _attend_many(q: Tensor, layer: int, cache: PagedCache, scores: Scores) -> Tensor:
    """Compute attention of several new tokens ``[sequences, tokens, heads, head]``, the cache's last ones."""
    tokens = q.shape[1]
    held = int(cache.lengths.max())
    keys, values = cache.read(layer, -(-held // PAGE))
    at = torch.arange(keys.shape[1], device=q.device)
    new = cache.lengths[:, None] - tokens + torch.arange(tokens, device=q.device)
    live = at <= new[..., None]  # [sequences, tokens, cached]
    if scores.window:
        live &= at > new[..., None] - scores.window
    q, keys, values = (part.transpose(1, 2) for part in (q, keys, values))
    if scores.cap:
        out = _capped(q, keys, values, live[:, None], scores)
    else:
        out = scaled_dot_product_attention(
            q, keys, values, live[:, None], scale=scores.scale, enable_gqa=True
        )
    return out.transpose(1, 2)


def _capped(q: Tensor, keys: Tensor, values: Tensor, live: Tensor, scores: Scores) -> Tensor:
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    score = many_rows.matmul(q, keys.transpose(2, 3)) * scores.scale
    score = torch.tanh(score / scores.cap) * scores.cap
    weight = score.float().masked_fill(~live, float("-inf")).softmax(-1)
    return many_rows.matmul(weight.to(q.dtype), values)


def _rotary_types(rotary: Any) -> list[str]:
    kinds = rotary.rope_type
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]


def _frequencies(rotary: Any, key: str, most: int) -> tuple[Tensor, float]:
    """Return frequencies and the factor of cosines and sines; longrope by the most that a sequence can be."""
    prefix = f"{key}_" if key else ""
    frequencies: Tensor = getattr(rotary, f"{prefix}original_inv_freq")
    scale = float(getattr(rotary, f"{prefix}attention_scaling"))
    if not key and rotary.rope_type == "longrope":
        short = rotary.config.rope_parameters["original_max_position_embeddings"]
        if most > short:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
                rotary.config, frequencies.device, seq_len=most
            )
    return frequencies, scale
