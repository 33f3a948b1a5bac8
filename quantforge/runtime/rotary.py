"""Rotary position embeddings: cosines and sines for token positions, with the frequencies of transformers.

A model has one set of frequencies (key "") or one set per layer type (gemma3; the key is the layer type).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# Supported rope types
SUPPORTED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "longrope"})
_QUERIES = " of queries"


def rotary_angles(
    rotary: Any, keys: Iterable[str], positions: Tensor, max_length: int, dtype: torch.dtype
) -> dict[str, tuple[Tensor, Tensor]]:
    """Compute cosines and sines ``[tokens, rotary / 2]`` for each set of frequencies; see also `query_angles_key`.

    Args:
        rotary: rotary embedding module of transformers.
        keys: keys of the sets in use.
        positions: token positions ``[tokens]``.
        max_length: maximum sequence length.
        dtype: type of the result; angles are computed in float32.
    """
    angles_by_key = {}
    for key in keys:
        frequencies, scale = rotary_frequencies(rotary, key, max_length)
        angles = positions[:, None].float() * frequencies.to(positions.device)
        angles_by_key[key] = ((angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype))
        query_scale = _query_scale(rotary.config, positions)
        if query_scale is not None:
            cosine, sine = angles.cos() * scale * query_scale, angles.sin() * scale * query_scale
            angles_by_key[f"{key}{_QUERIES}"] = (cosine.to(dtype), sine.to(dtype))
    return angles_by_key


def query_angles_key(key: str, angles: Mapping[str, object]) -> str:
    """Return the key of the angles for queries: ``key`` as for keys, unless queries have angles of their own."""
    return f"{key}{_QUERIES}" if f"{key}{_QUERIES}" in angles else key


def rotary_width(angles: tuple[Tensor, Tensor]) -> int:
    """Return the number of head dimensions that are rotated."""
    return 2 * angles[0].shape[-1]


def _query_scale(config: Any, positions: Tensor) -> Tensor | None:
    """Return the position-dependent query scale ``[tokens, 1]`` of ministral3 models; None for others."""
    parameters = getattr(config, "rope_parameters", None) or {}
    beta = parameters.get("llama_4_scaling_beta")
    if not beta:
        return None
    steps = torch.floor(positions / parameters["original_max_position_embeddings"])
    factor: Tensor = 1 + float(beta) * torch.log(1 + steps)
    return factor[:, None]


def rope_types(rotary: Any) -> list[str]:
    """Return the rope types of a model, as named by transformers."""
    kinds = rotary.rope_type
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]


def rotary_frequencies(rotary: Any, key: str, max_length: int) -> tuple[Tensor, float]:
    """Return the frequencies of a set and the scale of its cosines and sines.

    longrope uses other frequencies if sequences can be longer than the original context length.
    """
    prefix = f"{key}_" if key else ""
    frequencies: Tensor = getattr(rotary, f"{prefix}original_inv_freq")
    scale = float(getattr(rotary, f"{prefix}attention_scaling"))
    if not key and rotary.rope_type == "longrope":
        original_length = rotary.config.rope_parameters["original_max_position_embeddings"]
        if max_length > original_length:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
                rotary.config, frequencies.device, seq_len=max_length
            )
    return frequencies, scale
