"""The network of EAGLE-3: one decoder layer that reads tokens and, beside them, what the model thought before each.

For a token at place i + 1 and the features g of place i it computes (Li et al., arXiv 2503.01840):

    a = [norm(embedding of the token); norm(g)];  q, k, v = a W_qkv, rotated to place i
    y = g + attention(q, k, v) W_o;  y += mlp(norm(y));  logits of place i + 2 = norm(y) W_out

Features of the text are the states that went into three blocks of the model, side by side, times ``fc``; those of a
guess are the y of the place before. Its vocabulary may be a part of the model's: ``d2t`` says by how much the number of
each of its tokens is less than that of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantforge.runtime.cache import PagedCache
from quantforge.runtime.cache_shape import CacheShape
from quantforge.runtime.ragged import RaggedBatch, Span
from quantforge.runtime.rotary import angles_at
from quantforge.runtime.speculation.guesses import Computed
from quantforge.runtime.speculation.head_products import Product
from quantforge_kernels.attention import Scores
from quantforge_kernels.layers import add_norm, rotate, silu_gate

NOT_THERE = -1e30  # logit of a token that the heads do not know: logits have to be finite


@dataclass(frozen=True, slots=True)
class Eagle3Layer:
    """Weights of the network, and how it computes.

    Attributes:
        products: with the weights of its linears, by their names in the file without prefixes.
        norms: weights ``[hidden]``, likewise.
        embedding: ``[vocabulary, hidden]``, its own or the model's.
        targets: ``[tokens of its own]``, their ids in the model; None: the same.
        vocabulary: of the model.
        sizes: heads, key/value heads, and the width of a head.
        epsilon: of the norms.
        rotary: module of transformers that has the frequencies.
        normed: residuals begin behind the norm of the features (``norm_before_residual``).
        seen: blocks of the model whose states are its features, side by side.
    """

    products: dict[str, Product]
    norms: dict[str, Tensor]
    embedding: Tensor
    targets: Tensor | None
    vocabulary: int
    sizes: tuple[int, int, int]
    epsilon: float
    rotary: Any
    normed: bool
    seen: tuple[int, ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return the blocks of the model of which it sees what goes into them, each once."""
        return tuple(dict.fromkeys(self.seen))

    def cache(self, tokens: int) -> PagedCache:
        """Return a cache for one text."""
        _, kv_heads, head = self.sizes
        shape = CacheShape(1, kv_heads, head, "", self.embedding.dtype)
        return PagedCache(shape, 1, tokens, self.embedding.device)

    def features(self, computed: Computed) -> Tensor:
        """Return the features of text ``[tokens, hidden]`` that the model has computed."""
        parts = [computed.features[self.blocks.index(block)] for block in self.seen]
        return self.products["fc"](torch.cat(parts, -1))

    def compute(self, ids: Tensor, features: Tensor, span: Span, cache: PagedCache) -> Tensor:
        """Compute more tokens ``[tokens]`` with the features ``[tokens, hidden]`` before each; return y likewise."""
        batch = RaggedBatch([span], cache)
        tokens = self._norm(self.embedding[ids], "input_layernorm")
        before = self._norm(features, "hidden_norm")
        x = torch.cat((tokens, before), -1)
        q, k, v = (
            self.products[f"self_attn.{name}_proj"](x).view(len(ids), -1, self.sizes[2])
            for name in "qkv"
        )
        angles = angles_at(self.rotary, [""], batch.positions, cache.most_tokens, x.dtype)[""]
        q, k = rotate(q, *angles), rotate(k, *angles)
        cache.write(0, batch.slots[0], k, v)
        out = batch.attend(q, 0, cache, Scores(self.sizes[2] ** -0.5)).reshape(len(ids), -1)
        y = (before if self.normed else features) + self.products["self_attn.o_proj"](out)
        h = self._norm(y, "post_attention_layernorm")
        gated = silu_gate(self.products["mlp.gate_proj"](h), self.products["mlp.up_proj"](h))
        cache.advance(0, len(ids))
        return y + self.products["mlp.down_proj"](gated)

    def logits(self, y: Tensor) -> Tensor:
        """Return logits of the model's vocabulary ``[tokens, vocabulary]`` in float32."""
        own = self.products["lm_head"](self._norm(y, "norm")).float()
        if self.targets is None:
            return own
        found = own.new_full((len(y), self.vocabulary), NOT_THERE)
        found[:, self.targets] = own
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return add_norm(x, None, self.norms[name], self.epsilon)[0]
