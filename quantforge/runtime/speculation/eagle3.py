"""EAGLE-3: draft with one decoder layer that reads tokens and the model's hidden states.

For the token at position i + 1 and the features g of position i it computes (Li et al., arXiv 2503.01840):

    a = [norm(embedding of the token); norm(g)];  q, k, v = a W_qkv, rotated to position i
    y = g + attention(q, k, v) W_o;  y += mlp(norm(y));  logits of position i + 2 = norm(y) W_out

For tokens of the text, g is the concatenation of the inputs of three blocks of the model, multiplied by ``fc``; after a
drafted token, g is the y of the position before. The draft vocabulary may be a subset of the model's: ``d2t`` holds the
difference between the model's token id and the draft's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantforge.architectures.draft_heads import EMBEDDING, eagle3_stored_names
from quantforge.formats.sources.head_directory import DraftHeadDirectory
from quantforge.runtime.cache import CacheShape, PagedCache
from quantforge.runtime.ragged_attention import RaggedBatch, Span
from quantforge.runtime.rotary import SUPPORTED_ROPE_TYPES, rope_types, rotary_angles
from quantforge.runtime.speculation.drafter import PassOutputs, read_linear
from quantforge_kernels.layers import add_rms_norm, apply_rotary, silu_gate
from quantforge_kernels.score_options import ScoreOptions

ABSENT_LOGIT = -1e30  # logit of tokens outside the draft vocabulary: logits must be finite
NUM_TAPS = 3  # blocks of the model whose inputs are the features
_ROTARY_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")


class Eagle3Layer:
    """The EAGLE-3 draft layer, loaded for a model.

    Args:
        heads: directory of the draft layer.
        embedding: embedding of the model, ``[vocabulary, hidden]``; the layer takes its type and device.
        layers: number of blocks of the model.

    Attributes:
        taps: blocks of the model whose inputs it reads, without duplicates.
        linears: linears of the layer, by their names in the file without prefixes.

    Raises:
        InputError: a tensor is missing or does not match the model, or the configuration is not supported.
    """

    def __init__(self, heads: DraftHeadDirectory, embedding: Tensor, layers: int) -> None:
        vocabulary, model_hidden = embedding.shape
        config, hidden = heads.config, heads.number("hidden_size")
        expected = {"num_hidden_layers": 1, "hidden_act": "silu", "vocab_size": vocabulary}
        for key, value in expected.items():
            if config.get(key) not in (None, value):  # it may be a list
                raise heads.error(
                    f"{key} = {str(config[key])[:40]!r}", f"{value} is what this model takes"
                )
        q_heads = heads.number("num_attention_heads")
        kv_heads = heads.number("num_key_value_heads", default=q_heads)
        head_size = heads.number("head_dim", default=hidden // q_heads)
        mlp = heads.number("intermediate_size")
        draft_vocabulary = heads.number("draft_vocab_size", default=vocabulary)
        shapes = {
            "fc": (hidden, NUM_TAPS * model_hidden),
            "lm_head": (draft_vocabulary, hidden),
            "self_attn.q_proj": (q_heads * head_size, 2 * hidden),
            "self_attn.k_proj": (kv_heads * head_size, 2 * hidden),
            "self_attn.v_proj": (kv_heads * head_size, 2 * hidden),
            "self_attn.o_proj": (hidden, q_heads * head_size),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }

        def read(name: str, *shape: int) -> Tensor:
            return heads.read(shape, *eagle3_stored_names(name)).to(
                embedding.device, embedding.dtype
            )

        self.linears = {
            name: read_linear(heads, shape, eagle3_stored_names(name), embedding)
            for name, shape in shapes.items()
        }
        self._norms = {
            name: read(f"{name}.weight", hidden)
            for name in ("norm", "input_layernorm", "hidden_norm", "post_attention_layernorm")
        }
        if heads.find(*eagle3_stored_names(EMBEDDING)):
            self._embedding = read(EMBEDDING, vocabulary, hidden)
        elif hidden == model_hidden:
            self._embedding = embedding
        else:
            raise heads.error(
                f"no tensor {EMBEDDING!r}, and hidden_size is not the model's {model_hidden}",
                "fetch it again",
            )
        self._vocabulary, self._head_size = vocabulary, head_size
        self._target_ids = _read_target_ids(heads, draft_vocabulary, vocabulary, embedding.device)
        self._shape = CacheShape(1, kv_heads, head_size, "", embedding.dtype)
        self._epsilon = float(config.get("rms_norm_eps", 1e-6))
        self._rotary = _build_rotary(heads, hidden, q_heads, head_size)
        self._norm_before_residual = config.get("norm_before_residual") is True
        self._blocks = _tapped_blocks(heads, layers)
        self.taps = tuple(dict.fromkeys(self._blocks))

    def cache(self, sequences: int, tokens: int) -> PagedCache:
        """Allocate a KV cache for the draft layer."""
        return PagedCache(self._shape, sequences, tokens, self._embedding.device)

    def features(self, computed: PassOutputs) -> Tensor:
        """Return the features ``[tokens, hidden]`` of text tokens from the outputs of the model."""
        block_features = [computed.features[self.taps.index(block)] for block in self._blocks]
        return self.linears["fc"](torch.cat(block_features, -1))

    def compute(self, ids: Tensor, features: Tensor, span: Span, cache: PagedCache) -> Tensor:
        """Run the layer on tokens ``[tokens]`` and the features ``[tokens, hidden]`` before each; return y."""
        batch = RaggedBatch([span], cache)
        tokens = self._norm(self._embedding[ids], "input_layernorm")
        normed_features = self._norm(features, "hidden_norm")
        x = torch.cat((tokens, normed_features), -1)
        q, k, v = (
            self.linears[f"self_attn.{name}_proj"](x).view(len(ids), -1, self._head_size)
            for name in "qkv"
        )
        angles = rotary_angles(self._rotary, [""], batch.positions, cache.max_tokens, x.dtype)[""]
        q, k = apply_rotary(q, *angles), apply_rotary(k, *angles)
        cache.write(0, batch.slots[0], k, v)
        out = batch.attend(q, 0, cache, ScoreOptions(self._head_size**-0.5)).reshape(len(ids), -1)
        y = (normed_features if self._norm_before_residual else features) + self.linears[
            "self_attn.o_proj"
        ](out)
        h = self._norm(y, "post_attention_layernorm")
        gated = silu_gate(self.linears["mlp.gate_proj"](h), self.linears["mlp.up_proj"](h))
        cache.advance(0, len(ids))
        return y + self.linears["mlp.down_proj"](gated)

    def logits(self, y: Tensor) -> Tensor:
        """Return logits ``[tokens, vocabulary]`` over the model's vocabulary in float32."""
        draft_logits = self.linears["lm_head"](self._norm(y, "norm")).float()
        if self._target_ids is None:
            return draft_logits
        logits = draft_logits.new_full((len(y), self._vocabulary), ABSENT_LOGIT)
        logits[:, self._target_ids] = draft_logits
        return logits

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return add_rms_norm(x, None, self._norms[name], self._epsilon)[0]


def _read_target_ids(
    heads: DraftHeadDirectory, draft_vocabulary: int, vocabulary: int, device: torch.device
) -> Tensor | None:
    """Return the model's token ids of the draft vocabulary; None if both vocabularies are the same."""
    if draft_vocabulary == vocabulary and heads.find("d2t") is None:
        return None
    targets = heads.read_integers((draft_vocabulary,), "d2t").long() + torch.arange(
        draft_vocabulary
    )
    if int(targets.min()) < 0 or int(targets.max()) >= vocabulary:
        raise heads.error(
            f"d2t leads to token {int(targets.max())}, the model has {vocabulary}",
            "take heads that were trained for this very model",
        )
    return targets.to(device)


def _build_rotary(heads: DraftHeadDirectory, hidden: int, q_heads: int, head_size: int) -> Any:
    """Create the rotary embedding of a Llama model with this configuration."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = {key: heads.config[key] for key in _ROTARY_KEYS if heads.config.get(key) is not None}
    settings |= {"hidden_size": hidden, "num_attention_heads": q_heads, "head_dim": head_size}
    try:
        rotary = LlamaRotaryEmbedding(LlamaConfig(**settings))
    except (KeyError, TypeError, ValueError) as error:
        raise heads.error(
            f"rotary positions: {error!s:.200}", "rope_theta, rope_scaling as a llama has them"
        ) from error
    if not set(rope_types(rotary)) <= SUPPORTED_ROPE_TYPES:
        raise heads.error(
            f"rotary positions {rope_types(rotary)}", f"one of {sorted(SUPPORTED_ROPE_TYPES)}"
        )
    return rotary


def _tapped_blocks(heads: DraftHeadDirectory, layers: int) -> tuple[int, ...]:
    """Return the blocks whose inputs are read: from the configuration, or an early, a middle and a late one."""
    key, nested_config = "eagle_aux_hidden_state_layer_ids", heads.config.get("eagle_config")
    configured = {**(nested_config if isinstance(nested_config, dict) else {}), **heads.config}.get(
        key
    )
    blocks = (2, layers // 2, layers - 3) if configured is None else configured
    is_valid = isinstance(blocks, list | tuple) and len(blocks) == NUM_TAPS
    if not is_valid or not all(type(block) is int and 0 <= block < layers for block in blocks):
        raise heads.error(
            f"they see blocks {str(blocks)[:60]}", f"{NUM_TAPS} of the model's {layers}, from 0 on"
        )
    return tuple(blocks)
