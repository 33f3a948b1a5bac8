"""Gemma 4 as llama.cpp's graph has it: what it reads for each layer, and what it takes for granted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.architectures.gemma4_layers import (
    FULL,
    SLIDING,
    full_kv_heads,
    shared_width,
    turns,
    uncovered,
    words_of,
)
from quantforge.architectures.layer_inputs import WIDTH
from quantforge.architectures.shared_keys import first_shared

CAP = 30.0  # of logits, in a file that has no key
_TURNS = {SLIDING: ("default",), FULL: ("default", "proportional")}  # kinds of rotary positions


def kv_heads(config: Mapping[str, Any]) -> list[int]:
    """Return how many heads of keys every layer has."""
    own, full = config["num_key_value_heads"], full_kv_heads(config)
    return [full if word == FULL else own for word in words_of(config)]


def slides(config: Mapping[str, Any]) -> list[bool]:
    """Return whether every layer has a window."""
    return [word == SLIDING for word in words_of(config)]


def widths(config: Mapping[str, Any]) -> list[int]:
    """Return the width of the MLP of every layer."""
    wide, words = shared_width(config), words_of(config)
    first = first_shared(config, words)
    own = config["intermediate_size"]
    return [wide if index >= first else own for index in range(len(words))]


def softcap(config: Mapping[str, Any]) -> Any:
    """Return the cap of logits, 0 for none; llama.cpp caps by `CAP` where a file does not say."""
    return config.get("final_logit_softcapping") or 0.0


def obstacle(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what llama.cpp's graph does not compute, and what it does; None where it computes all."""
    words = words_of(config)
    if beyond := uncovered(config):
        return beyond, "attention to earlier tokens, heads of full layers that are alike"
    if SLIDING not in words:
        return "layers that are all full", "some with a window"
    first = first_shared(config, words)
    sources = {FULL: first - 1, SLIDING: first - 2}  # of keys, in llama.cpp
    for word in {*words[first:]}:
        last = max(index for index in range(first) if words[index] == word)
        if last != sources[word]:
            return f"{word} that reads keys of layer {last}", f"those of layer {sources[word]}"
    if config.get(WIDTH) and config["vocab_size_per_layer_input"] != config["vocab_size"]:
        return (
            f"vocab_size_per_layer_input = {config['vocab_size_per_layer_input']}",
            f"vocab_size, {config['vocab_size']}",
        )
    for word, stated in turns(config).items():
        kind = stated.get("rope_type", "default")
        if kind not in _TURNS[word]:
            return f"rope_type = {str(kind)[:40]!r} of {word}", " or ".join(_TURNS[word])
    return None
