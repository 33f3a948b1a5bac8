"""Files of EAGLE-3: the tensors of its network under their names, and what its configuration says of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantforge.architectures.draft_heads import EMBEDDING, stored_names
from quantforge.formats.sources.head_directory import HeadDirectory
from quantforge.runtime.rotary import STATIC_ROTARY, kinds_of
from quantforge.runtime.speculation.eagle3_layer import Eagle3Layer
from quantforge.runtime.speculation.head_products import read_product

SEEN = 3  # blocks of the model
_ROTARY = (
    "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "hidden_size", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip


def read_eagle3(found: HeadDirectory, embedding: Tensor, layers: int) -> Eagle3Layer:
    """Read the network for a model with an embedding ``[vocabulary, hidden]``, whose type and device it gets.

    Args:
        found: its directory.
        embedding: of the model.
        layers: blocks of the model.

    Raises:
        InputError: a tensor is missing, or of another width or vocabulary; or it is no network of this kind.
    """
    vocabulary, seen = embedding.shape
    config, hidden = found.config, found.number("hidden_size")
    for key, known in (
        ("num_hidden_layers", 1),
        ("hidden_act", "silu"),
        ("vocab_size", vocabulary),
    ):
        if config.get(key) not in (None, known):  # it may be a list
            raise found.error(
                f"{key} = {str(config[key])[:40]!r}", f"{known} is what this model takes"
            )
    heads = found.number("num_attention_heads")
    kv_heads = found.number("num_key_value_heads", default=heads)
    head, mlp = found.number("head_dim", default=hidden // heads), found.number("intermediate_size")
    own = found.number("draft_vocab_size", default=vocabulary)

    def read(*names: str, shape: tuple[int, ...]) -> Tensor:
        return found.read(shape, *names).to(embedding.device, embedding.dtype)

    shapes = {
        "fc": (hidden, SEEN * seen), "lm_head": (own, hidden),
        "self_attn.q_proj": (heads * head, 2 * hidden), "self_attn.k_proj": (kv_heads * head, 2 * hidden),
        "self_attn.v_proj": (kv_heads * head, 2 * hidden), "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp),
    }  # fmt: skip
    products = {
        owner: read_product(
            found, shape, stored_names(f"{owner}.weight"), stored_names(f"{owner}.bias"), embedding
        )
        for owner, shape in shapes.items()
    }
    norms = {
        name: read(*stored_names(f"{name}.weight"), shape=(hidden,))
        for name in ("norm", "input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    tables = stored_names(EMBEDDING)
    if found.find(*tables):
        embedding = read(*tables, shape=(vocabulary, hidden))
    elif hidden != seen:
        raise found.error(
            f"no tensor {tables[0]!r}, and hidden_size is not the model's {seen}", "fetch it again"
        )
    return Eagle3Layer(
        products, norms, embedding, _targets(found, own, vocabulary, embedding.device), vocabulary,
        (heads, kv_heads, head), float(config.get("rms_norm_eps", 1e-6)), _rotary(found, hidden, heads, head),
        config.get("norm_before_residual") is True, _blocks(found, layers),
    )  # fmt: skip


def _targets(found: HeadDirectory, own: int, vocabulary: int, where: torch.device) -> Tensor | None:
    if own == vocabulary and found.find("d2t") is None:
        return None
    offsets = found.integers((own,), "d2t")
    targets = offsets.long() + torch.arange(own)
    if int(targets.min()) < 0 or int(targets.max()) >= vocabulary:
        raise found.error(
            f"d2t leads to token {int(targets.max())}, the model has {vocabulary}",
            "take heads that were trained for this very model",
        )
    return targets.to(where)


def _rotary(found: HeadDirectory, hidden: int, heads: int, head: int) -> Any:
    """Return the frequencies of a llama of this configuration."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    given = {key: found.config[key] for key in _ROTARY if found.config.get(key) is not None}
    given |= {"hidden_size": hidden, "num_attention_heads": heads, "head_dim": head}
    try:
        rotary = LlamaRotaryEmbedding(LlamaConfig(**given))
    except (KeyError, TypeError, ValueError) as error:
        raise found.error(
            f"rotary positions: {error!s:.200}", "rope_theta, rope_scaling as a llama has them"
        ) from error
    if not set(kinds_of(rotary)) <= STATIC_ROTARY:
        raise found.error(f"rotary positions {kinds_of(rotary)}", f"one of {sorted(STATIC_ROTARY)}")
    return rotary


def _blocks(found: HeadDirectory, layers: int) -> tuple[int, ...]:
    """Return the blocks that are seen: those that the configuration lists, or early, middle and late ones."""
    nested = found.config.get("eagle_config")
    stated = {**(nested if isinstance(nested, dict) else {}), **found.config}.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    blocks = (2, layers // 2, layers - 3) if stated is None else stated
    fits = isinstance(blocks, list | tuple) and len(blocks) == SEEN
    if not fits or not all(type(one) is int and 0 <= one < layers for one in blocks):
        raise found.error(
            f"they see blocks {str(blocks)[:60]}", f"{SEEN} of the model's {layers}, from 0 on"
        )
    return tuple(blocks)
