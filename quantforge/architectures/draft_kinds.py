"""Kinds of draft heads, told by a configuration: networks that guess further tokens from what a model has computed.

They lie in a directory of their own, and are no models: EAGLE-3 calls itself a llama, which it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEDUSA, EAGLE3 = "medusa", "eagle3"
KNOWN = (MEDUSA, EAGLE3)


def draft_kind(config: Mapping[str, Any]) -> str | None:
    """Return the kind of draft heads that a ``config.json`` describes, also one not in `KNOWN`; None for a model."""
    names = config.get("architectures")
    words = [config.get("model_type"), config.get("speculators_model_type")]
    words += names if isinstance(names, list) else []
    said = " ".join(word.lower() for word in words if isinstance(word, str))
    if "medusa_num_heads" in config or MEDUSA in said:
        return MEDUSA
    if EAGLE3 in said or ("draft_vocab_size" in config and "eagle" not in said):
        return EAGLE3
    return "eagle" if "eagle" in said else None


def is_draft(config: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` is of draft heads that are read here."""
    return draft_kind(config) in KNOWN


def type_of(config: Mapping[str, Any]) -> str:
    """Return what a ``config.json`` is of: a kind of draft heads, or its ``model_type``; "" where it states none."""
    kind = draft_kind(config)
    return kind if kind in KNOWN else str(config.get("model_type", ""))
