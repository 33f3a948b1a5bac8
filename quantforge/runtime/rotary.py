"""Angles of rotary positions: frequencies as transformers derives them, times positions.

A model has one set of frequencies, or one for each type of layer (gemma3), each with a key: "" for the only one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

STATIC_ROTARY = frozenset(
    {"default", "linear", "llama3", "yarn", "longrope"}
)  # kinds that are computed here
_QUERIES = " of queries"


def angles_at(
    rotary: Any, keys: Iterable[str], positions: Tensor, most: int, dtype: torch.dtype
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return cosines and sines ``[tokens, rotary / 2]`` by the key of each set, see also `queries_of`.

    Args:
        rotary: module of transformers.
        keys: of the sets that are in use.
        positions: ``[tokens]``.
        most: tokens that a sequence can have.
        dtype: of the result; angles are float32.
    """
    found = {}
    for key in keys:
        frequencies, scale = frequencies_of(rotary, key, most)
        angles = positions[:, None].float() * frequencies.to(positions.device)
        found[key] = ((angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype))
        growth = _growth(rotary.config, positions)
        if growth is not None:
            cosine, sine = angles.cos() * scale * growth, angles.sin() * scale * growth
            found[f"{key}{_QUERIES}"] = (cosine.to(dtype), sine.to(dtype))
    return found


def queries_of(key: str, angles: Mapping[str, object]) -> str:
    """Return the key of the angles of queries: ``key``, that of the keys, unless queries have their own."""
    return f"{key}{_QUERIES}" if f"{key}{_QUERIES}" in angles else key


def width_of(angles: tuple[Tensor, Tensor]) -> int:
    """Return how many dimensions of a head are rotated by cosines and sines."""
    return 2 * angles[0].shape[-1]


def _growth(config: Any, positions: Tensor) -> Tensor | None:
    """Return the factor of queries ``[tokens, 1]`` that grows with their positions (ministral3), or None."""
    parameters = getattr(config, "rope_parameters", None) or {}
    beta = parameters.get("llama_4_scaling_beta")
    if not beta:
        return None
    steps = torch.floor(positions / parameters["original_max_position_embeddings"])
    factor: Tensor = 1 + float(beta) * torch.log(1 + steps)
    return factor[:, None]


def kinds_of(rotary: Any) -> list[str]:
    """Return the kinds of rotary that a model has, by transformers' names."""
    kinds = rotary.rope_type
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]


def frequencies_of(rotary: Any, key: str, most: int) -> tuple[Tensor, float]:
    """Return the frequencies of a set, and the factor of its cosines and sines.

    longrope has other frequencies where sequences can be longer than those that the model was first trained on.
    """
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
