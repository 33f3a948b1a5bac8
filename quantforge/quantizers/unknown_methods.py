"""Refusals of words that are no method, with what was meant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quantforge.errors import UnknownNameError, nearest

if TYPE_CHECKING:
    from quantforge.quantizers import Method


def unknown_method(word: str, text: str, methods: Mapping[str, Method]) -> UnknownNameError:
    """Return the refusal of a word of a sum of methods; the hint is the sum, where all its words are methods."""
    where = f" in '{text}'" if word != text.lower() else ""
    words = re.findall(r"\w+", text.lower())
    if len(words) < 2 or not methods.keys() >= {*words}:
        return UnknownNameError(f"unknown method '{word}'{where}", nearest(word, methods))
    words.sort(key=lambda one: methods[one].kind in {"rounder", "block method"})
    return UnknownNameError(f"unknown method '{word}'{where}", f"--method {'+'.join(words)}")
