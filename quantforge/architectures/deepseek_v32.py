"""DeepSeek 3.2: a deepseek_v3 whose attention reads the tokens that an indexer chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import deepseek_v3, latent, llama
from quantforge.architectures.declare import gated_mlp
from quantforge.architectures.mixtures import dense_or_sparse, listed

INDEXED = "indexed_attention/"


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer; errors as `listed`."""
    return [INDEXED + kind for kind in listed(config)]


ARCHITECTURE = replace(
    deepseek_v3.ARCHITECTURE,
    model_type="deepseek_v32",
    kinds=dense_or_sparse(
        llama.NORMS,
        latent.latent_attention("attention_bias", indexer=True),
        dense=gated_mlp(),
        sparse=deepseek_v3.MIXTURE,
        prefix=INDEXED,
    ),
    kind_of=kinds,
    gguf=None,
    sizes={**deepseek_v3.ARCHITECTURE.sizes, **latent.INDEXER_SIZES},
    defaults={
        **deepseek_v3.ARCHITECTURE.defaults,
        "index_n_heads": 64,
        "index_head_dim": 128,
    },
)
