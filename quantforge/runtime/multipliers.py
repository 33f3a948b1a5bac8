"""Factors on embeddings, residuals and logits that configurations state, by the words of all families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors of one model; 1.0 where it has none."""

    embedding: float
    residual: float
    logits: float


def multipliers_of(config: Any) -> Multipliers:
    """Return the factors of a configuration of transformers."""
    return Multipliers(
        embedding=_stated(config, "embedding_multiplier"),
        residual=_stated(config, "residual_multiplier"),
        logits=_stated(config, "logit_scale") / _stated(config, "logits_scaling"),
    )


def _stated(config: Any, key: str) -> float:
    return float(getattr(config, key, None) or 1.0)
