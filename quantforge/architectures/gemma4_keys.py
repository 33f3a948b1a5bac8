"""Gemma 4 as the keys and tensors of a GGUF file describe it: a configuration of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantforge.architectures.gemma4_graph import CAP
from quantforge.architectures.gemma4_layers import FULL, K_EQ_V, MIXTURE, SLIDING
from quantforge.architectures.layer_inputs import WIDTH
from quantforge.architectures.layer_overrides import KEY
from quantforge.architectures.llama_cpp import Keys
from quantforge.architectures.shared_keys import COUNT

_NEVER = 1e30  # divides a frequency to nothing


def restated(keys: Keys) -> dict[str, Any]:
    """Return what the keys of a file say in ``config.json``; what no configuration says is not read."""
    slides = [bool(item) for item in keys.of_layers("attention.sliding_window_pattern", bool)]
    if not slides or slides[-1] or not any(slides):
        raise keys.not_read(
            "attention.sliding_window_pattern", "a full layer at the end, windows before"
        )
    first = len(slides) - keys.integer("attention.shared_kv_layers", 0)
    if first <= 0:
        raise keys.not_read("attention.shared_kv_layers", "fewer than there are layers")
    softcap = keys.real("final_logit_softcapping", CAP)
    return {
        "layer_types": [SLIDING if one else FULL for one in slides],
        "sliding_window": keys.integer("attention.sliding_window"),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": softcap or None,
        COUNT: len(slides) - first,
        WIDTH: keys.integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": _rows(keys),
        **_heads(keys, slides, first),
        **_widths(keys, first),
        **_mixture(keys),
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", 1e4)},
            FULL: _full_rope(keys),
        },
    }


def _rows(keys: Keys) -> int:
    """Return the size of the vocabulary whose tokens have a vector for every layer."""
    table = keys.shape("per_layer_token_embd.weight") or keys.shape("token_embd.weight")
    return next(iter(table), 0)


def _heads(keys: Keys, slides: Sequence[bool], first: int) -> dict[str, Any]:
    """Return heads of both types of layers; keys of full ones are values where these have no projection."""
    counts = keys.of_layers("attention.head_count_kv")
    own, full = (
        {count for count, one in zip(counts, slides, strict=True) if one is word}
        for word in (True, False)
    )
    if len(own) > 1 or len(full) > 1:
        raise keys.not_read(
            f"attention.head_count_kv = {str(counts)[:40]}", "one number for each type"
        )
    (own_count,), (full_count,) = own, full
    width, wide = keys.integer("attention.key_length_swa"), keys.integer("attention.key_length")
    layers = [index for index, one in enumerate(slides) if not one]
    equal = not any(keys.shape(f"blk.{index}.attn_v.weight") for index in layers if index < first)
    found = {"head_dim": width, "num_key_value_heads": own_count, K_EQ_V: equal}
    if equal or full_count == own_count:
        published = {"num_global_key_value_heads": full_count} if equal else {}
        return {**found, "global_head_dim": wide, **published}
    other = {"head_dim": wide, "num_key_value_heads": full_count}
    return {**found, KEY: {str(index): other for index in layers}}


def _widths(keys: Keys, first: int) -> dict[str, Any]:
    """Return the width of the MLP, and whether that of the last layers is twice as wide."""
    widths = keys.of_layers("feed_forward_length")
    own, shared = {*widths[:first]}, {*widths[first:]}
    twice = shared == {2 * widths[0]}
    if len(own) > 1 or not (twice or shared <= own):
        raise keys.not_read(
            f"feed_forward_length = {str(widths)[:40]}", "one, or twice that where keys are shared"
        )
    return {"intermediate_size": widths[0], "use_double_wide_mlp": twice}


def _mixture(keys: Keys) -> dict[str, Any]:
    experts = keys.integer("expert_count", 0)
    if not experts:
        return {MIXTURE: False}
    return {
        MIXTURE: True,
        "num_experts": experts,
        "top_k_experts": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }


def _full_rope(keys: Keys) -> dict[str, Any]:
    """Return the rotary positions of full layers: of a part of a head, where the others are divided to nothing."""
    plain = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base", 1e4)}
    divisors = keys.divisors()
    turning = [value for value in divisors if value < _NEVER]
    if not divisors or {*divisors} == {1.0}:
        return plain
    if {*divisors[: len(turning)]} != {*turning} or len({*turning}) != 1:
        raise keys.not_read(
            "rope_freqs.weight", "one divisor, then those that stop what does not turn"
        )
    width = 2 * len(divisors)
    share = 2 * len(turning) / width
    if int(share * width // 2) != len(turning):  # rounded downwards
        share = (2 * len(turning) + 1) / width
    factor = {} if turning[0] == 1 else {"factor": turning[0]}
    return {**plain, "rope_type": "proportional", "partial_rotary_factor": share, **factor}
