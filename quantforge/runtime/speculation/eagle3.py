"""EAGLE-3: one decoder layer that reads each token together with what the model computed before it.

For a token at place i + 1 and the features g of place i it computes (Li et al., arXiv 2503.01840):

    a = [norm(embedding of the token); norm(g)];  q, k, v = a W_qkv, rotated to place i
    y = g + attention(q, k, v) W_o;  y += mlp(norm(y));  logits of place i + 2 = norm(y) W_out

Features of the text are the states that went into three blocks of the model, side by side, times ``fc``; those of a
drafted token are the y of the place before. Its vocabulary may be a part of the model's: ``d2t`` holds the difference
between the model's token id and its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantforge.architectures.draft_heads import EMBEDDING, stored_names
from quantforge.formats.sources.head_directory import DraftHeadDirectory
from quantforge.runtime.cache import CacheShape, PagedCache
from quantforge.runtime.ragged_attention import RaggedBatch, Span
from quantforge.runtime.rotary import STATIC_ROTARY, angles_at, kinds_of
from quantforge.runtime.speculation.drafter import Computed, read_linear
from quantforge_kernels.attention import ScoreOptions
from quantforge_kernels.layers import add_rms_norm, apply_rotary, silu_gate

ABSENT = -1e30  # logit of a token that is not in its vocabulary: logits have to be finite
TAPS = 3  # blocks of the model whose inputs are its features
_ROTARY = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")


class Eagle3Layer:
    """The network, read for a model.

    Args:
        heads: its directory.
        embedding: of the model, ``[vocabulary, hidden]``; the network gets its type and device.
        layers: blocks of the model.

    Attributes:
        taps: blocks of the model whose inputs it reads, each once.
        linears: its linears, by their names in the file without prefixes.

    Raises:
        InputError: a tensor is missing, or of another width or vocabulary; or it is another kind of network.
    """

    def __init__(self, heads: DraftHeadDirectory, embedding: Tensor, layers: int) -> None:
        vocabulary, seen = embedding.shape
        config, hidden = heads.config, heads.number("hidden_size")
        expected = {"num_hidden_layers": 1, "hidden_act": "silu", "vocab_size": vocabulary}
        for key, value in expected.items():
            if config.get(key) not in (None, value):  # it may be a list
                raise heads.error(
                    f"{key} = {str(config[key])[:40]!r}", f"{value} is what this model takes"
                )
        q_heads = heads.number("num_attention_heads")
        kv_heads = heads.number("num_key_value_heads", default=q_heads)
        width = heads.number("head_dim", default=hidden // q_heads)
        mlp = heads.number("intermediate_size")
        own = heads.number("draft_vocab_size", default=vocabulary)
        shapes = {
            "fc": (hidden, TAPS * seen),
            "lm_head": (own, hidden),
            "self_attn.q_proj": (q_heads * width, 2 * hidden),
            "self_attn.k_proj": (kv_heads * width, 2 * hidden),
            "self_attn.v_proj": (kv_heads * width, 2 * hidden),
            "self_attn.o_proj": (hidden, q_heads * width),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }

        def read(name: str, *shape: int) -> Tensor:
            return heads.read(shape, *stored_names(name)).to(embedding.device, embedding.dtype)

        self.linears = {
            name: read_linear(heads, shape, stored_names(name), embedding)
            for name, shape in shapes.items()
        }
        self._norms = {
            name: read(f"{name}.weight", hidden)
            for name in ("norm", "input_layernorm", "hidden_norm", "post_attention_layernorm")
        }
        if heads.find(*stored_names(EMBEDDING)):
            self._embedding = read(EMBEDDING, vocabulary, hidden)
        elif hidden == seen:
            self._embedding = embedding
        else:
            raise heads.error(
                f"no tensor {EMBEDDING!r}, and hidden_size is not the model's {seen}",
                "fetch it again",
            )
        self._vocabulary, self._width = vocabulary, width
        self._targets = _targets(heads, own, vocabulary, embedding.device)
        self._shape = CacheShape(1, kv_heads, width, "", embedding.dtype)
        self._epsilon = float(config.get("rms_norm_eps", 1e-6))
        self._rotary = _rotary(heads, hidden, q_heads, width)
        self._residual_normed = config.get("norm_before_residual") is True
        self._blocks = _blocks(heads, layers)
        self.taps = tuple(dict.fromkeys(self._blocks))

    def cache(self, sequences: int, tokens: int) -> PagedCache:
        """Return a cache."""
        return PagedCache(self._shape, sequences, tokens, self._embedding.device)

    def features(self, computed: Computed) -> Tensor:
        """Return the features of text ``[tokens, hidden]`` that the model computed."""
        parts = [computed.features[self.taps.index(block)] for block in self._blocks]
        return self.linears["fc"](torch.cat(parts, -1))

    def compute(self, ids: Tensor, features: Tensor, span: Span, cache: PagedCache) -> Tensor:
        """Compute more tokens ``[tokens]`` with the features ``[tokens, hidden]`` before each; return y likewise."""
        batch = RaggedBatch([span], cache)
        tokens = self._norm(self._embedding[ids], "input_layernorm")
        before = self._norm(features, "hidden_norm")
        x = torch.cat((tokens, before), -1)
        q, k, v = (
            self.linears[f"self_attn.{name}_proj"](x).view(len(ids), -1, self._width)
            for name in "qkv"
        )
        angles = angles_at(self._rotary, [""], batch.positions, cache.most_tokens, x.dtype)[""]
        q, k = apply_rotary(q, *angles), apply_rotary(k, *angles)
        cache.write(0, batch.slots[0], k, v)
        out = batch.attend(q, 0, cache, ScoreOptions(self._width**-0.5)).reshape(len(ids), -1)
        y = (before if self._residual_normed else features) + self.linears["self_attn.o_proj"](out)
        h = self._norm(y, "post_attention_layernorm")
        gated = silu_gate(self.linears["mlp.gate_proj"](h), self.linears["mlp.up_proj"](h))
        cache.advance(0, len(ids))
        return y + self.linears["mlp.down_proj"](gated)

    def logits(self, y: Tensor) -> Tensor:
        """Return logits of the model's vocabulary ``[tokens, vocabulary]`` in float32."""
        own = self.linears["lm_head"](self._norm(y, "norm")).float()
        if self._targets is None:
            return own
        found = own.new_full((len(y), self._vocabulary), ABSENT)
        found[:, self._targets] = own
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return add_rms_norm(x, None, self._norms[name], self._epsilon)[0]


def _targets(
    heads: DraftHeadDirectory, own: int, vocabulary: int, device: torch.device
) -> Tensor | None:
    """Return the model's ids of its tokens ``[own]``; None where they are the same."""
    if own == vocabulary and heads.find("d2t") is None:
        return None
    targets = heads.integers((own,), "d2t").long() + torch.arange(own)
    if int(targets.min()) < 0 or int(targets.max()) >= vocabulary:
        raise heads.error(
            f"d2t leads to token {int(targets.max())}, the model has {vocabulary}",
            "take heads that were trained for this very model",
        )
    return targets.to(device)


def _rotary(heads: DraftHeadDirectory, hidden: int, q_heads: int, width: int) -> Any:
    """Return the frequencies of a llama of this configuration."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    given = {key: heads.config[key] for key in _ROTARY if heads.config.get(key) is not None}
    given |= {"hidden_size": hidden, "num_attention_heads": q_heads, "head_dim": width}
    try:
        rotary = LlamaRotaryEmbedding(LlamaConfig(**given))
    except (KeyError, TypeError, ValueError) as error:
        raise heads.error(
            f"rotary positions: {error!s:.200}", "rope_theta, rope_scaling as a llama has them"
        ) from error
    if not set(kinds_of(rotary)) <= STATIC_ROTARY:
        raise heads.error(f"rotary positions {kinds_of(rotary)}", f"one of {sorted(STATIC_ROTARY)}")
    return rotary


def _blocks(heads: DraftHeadDirectory, layers: int) -> tuple[int, ...]:
    """Return the blocks whose inputs are read: those that are listed, or an early, a middle and a late one."""
    key, nested = "eagle_aux_hidden_state_layer_ids", heads.config.get("eagle_config")
    listed = {**(nested if isinstance(nested, dict) else {}), **heads.config}.get(key)
    blocks = (2, layers // 2, layers - 3) if listed is None else listed
    fits = isinstance(blocks, list | tuple) and len(blocks) == TAPS
    if not fits or not all(type(one) is int and 0 <= one < layers for one in blocks):
        raise heads.error(
            f"they see blocks {str(blocks)[:60]}", f"{TAPS} of the model's {layers}, from 0 on"
        )
    return tuple(blocks)
