"""Positions of a model: how many tokens it can see at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.architectures import text_config

POSITIONS = ("max_position_embeddings", "n_positions")


def positions_in(config: Mapping[str, Any]) -> int:
    """Return how many tokens a model can see, by its configuration; 2^30 where that does not say."""
    text = text_config(config)
    return min((text[key] for key in POSITIONS if text.get(key)), default=1 << 30)
