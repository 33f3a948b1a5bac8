"""What a model can be given, by its configuration: how many tokens at once, and which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.architectures import architecture_of, text_config

POSITIONS = ("max_position_embeddings", "n_positions")


def positions_in(config: Mapping[str, Any]) -> int:
    """Return how many tokens a model can see, by its configuration; 2^30 where that does not say."""
    text = text_config(config)
    return min((text[key] for key in POSITIONS if text.get(key)), default=1 << 30)


def embedding_rows(config: Mapping[str, Any]) -> int | None:
    """Return how many token ids a model has an embedding for; None where neither configuration nor family says."""
    rows = text_config(config).get("vocab_size")
    if rows is None and (family := architecture_of(config)) is not None:
        rows = family.defaults.get("vocab_size")
    return rows if type(rows) is int else None
