"""Tied embeddings: an output projection that is the embedding itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.errors import InputError

SAME = "equal to the tied embedding"  # why a head that is stored a second time is left out


def tied(
    config: Mapping[str, Any], outer: Mapping[str, Any], defaults: Mapping[str, object]
) -> bool:
    """Return whether the output projection is the embedding.

    The outer configuration says it, as transformers reads a model with further towers, else that of the text, else the
    family's default.

    Raises:
        InputError: ``tie_word_embeddings`` is neither true nor false.
    """
    for source in (outer, config, defaults):
        value = source.get("tie_word_embeddings")
        if value is not None:
            if not isinstance(value, bool):
                raise InputError(f"config.json: tie_word_embeddings = {value!r}", "true or false")
            return value
    return False


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration for a head of its own; families look in different places, so that all places say so."""
    nested = config.get("text_config")
    inner = {"text_config": untied(nested)} if isinstance(nested, Mapping) else {}
    return {**config, **inner, "tie_word_embeddings": False}


def no_tie(embedding: str, head: str) -> InputError:
    """Return the error for a tied head that is stored twice, and not alike."""
    return InputError(
        f"{head} differs from {embedding} although tie_word_embeddings is true",
        'a model with its own head says "tie_word_embeddings": false in config.json',
        tensor=head,
    )
