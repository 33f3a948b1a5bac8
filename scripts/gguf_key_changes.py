"""Other values of every key of a configuration, for `gguf_keys`: left out, inverted, scaled, null, another word."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

ABSENT = object()
SKIPPED = re.compile(
    r"architectures|model_type|transformers_version|dtype|torch_dtype|vocab_size|_name_or_path|.*token_id|.*token_index"
    r"|vision_config|audio_config|id2label|label2id|problem_type|quantization_config|return_dict|output_.*|use_cache"
)
_WORDS = {
    r"hidden_act.*|activation_function": ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2"],
    r"scoring_func": ["softmax", "sigmoid", "sqrtsoftplus"],
    r"topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    r"use_bidirectional_attention": ["all", "vision"],
    r"position_embedding_type": ["rope", "nope", "alibi"],
}  # fmt: skip
# Keys that several classes obey though they do not have them, or that older files have.
_FURTHER: dict[str, list[Any]] = {
    "rope_theta": [100.0], "partial_rotary_factor": [0.5], "is_causal": [False], "tie_word_embeddings": [True, False],
    "rope_scaling": [{"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}],
    "per_layer_config": [{"0": {"intermediate_size": 64}}, {"1": {"num_key_value_heads": 1}}],
    "original_max_position_embeddings": [16], "head_dim": [8, 32], "use_bidirectional_attention": [True, "all"],
    "sliding_window": [8], "attention_chunk_size": [8], "use_sliding_window": [True], "first_k_dense_replace": [1],
    **{key: [[word] * count for word in words for count in (3, 4)] for key, words in {
        "layer_types": ("sliding_attention", "full_attention", "chunked_attention"),
        "mlp_layer_types": ("dense", "sparse")}.items()},
    **{key: [0.3] for key in ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")},
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}, _YARN, {**_YARN, "truncate": False},
    {**_YARN, "attention_factor": 1.4}, {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.4},
    {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, {**_YARN, "beta_fast": 4.0, "beta_slow": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
]  # fmt: skip
_MORE: list[dict[str, Any]] = [
    {"partial_rotary_factor": 0.5}, {"truncate": False}, {"attention_factor": 1.4}, {"mscale_all_dim": 1.4},
    {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8}, {"rope_theta": 10.0}, {"mscale": 1.4},
    {"factor": 3.0},
]  # fmt: skip


def variants(key: str, value: Any, config: Mapping[str, Any]) -> Iterator[Any]:
    """Yield other values of a key; ``config`` says how many heads there are."""
    words = next((found for pattern, found in _WORDS.items() if re.fullmatch(pattern, key)), [])
    yield from (word for word in words if word != value)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from _integers(key, value, config.get("num_attention_heads"))
    elif isinstance(value, float) and "eps" in key:
        yield 0.3
    elif isinstance(value, float):
        yield from (1.5 * value, 0.5 * value, 0.0, 1.0, None)
    elif value is None:
        yield from (True, 1, 2, 16, 0.5, 5.0, [1], [1.0] * 4)
    elif isinstance(value, list):
        yield from _lists(value)
    elif isinstance(value, dict):
        yield from _mappings(value, config)


def _integers(key: str, value: int, heads: object) -> Iterator[Any]:
    near = [0, 1, 2, 3, value - 1, value + 1] if value < 10 else [0, value // 2]
    if heads and "heads" in key:
        near.append(heads)
    yield from dict.fromkeys([*near, 2 * value])
    yield None


def _lists(value: list[Any]) -> Iterator[Any]:
    yield from ([], [0], value[::-1], None)
    yield from ([item] * len(value) for item in sorted({*map(str, value)}) if item in value)
    if value and type(value[0]) is int:
        yield from ([0] * len(value), [1] * len(value), [*value, 1], [item + 1 for item in value])


def _mappings(value: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield other rotary positions: of one kind of layers, or each key, or another scaling."""
    yield {}
    for name, item in value.items():
        if isinstance(item, dict):
            yield from ({**value, name: changed} for changed in _mappings(item, config))
        elif name != "rope_type":
            yield {other: kept for other, kept in value.items() if other != name}
            yield from ({**value, name: changed} for changed in variants(name, item, config))
    if "rope_theta" in value:
        plain = {key: item for key, item in value.items() if key in {"rope_theta", "mrope_section"}}
        yield from ({**plain, **scaling} for scaling in _SCALINGS)
        yield from ({**value, **more} for more in _MORE)


def _older(rope: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield rotary positions as configurations of older versions state them, beside each other."""
    outside = {"rope_theta", "partial_rotary_factor"}
    plain = {key: value for key, value in rope.items() if key in outside}
    inner = {key: value for key, value in rope.items() if key not in {*outside, "rope_type"}}
    own = {**inner, "type": rope.get("rope_type", "default")}
    yield {**plain, "rope_scaling": own if inner else None}
    yield {**plain, "rope_theta": 100.0}
    yield {**plain, "partial_rotary_factor": 0.5}
    yield from ({**plain, "rope_scaling": {**inner, **scaling}} for scaling in _SCALINGS)


def cases(raw: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the key, its value and the configuration of every change.

    Args:
        raw: the configuration as it is published.
        known: all that its class knows.
    """
    for place in ("", "text_config"):
        part = raw.get(place) if place else raw
        if not isinstance(part, Mapping):
            continue
        rope = part.get("rope_parameters")
        if isinstance(rope, Mapping) and "rope_theta" in rope:
            rest = {key: value for key, value in part.items() if key != "rope_parameters"}
            for older in _older(rope):
                changed = {**rest, **older}
                yield "(older rope)", older, {**raw, place: changed} if place else changed
        whole = {**((known.get(place) or {}) if place else known), **part}
        for key in dict.fromkeys([*whole, *_FURTHER]):
            if SKIPPED.fullmatch(key) or (key == "text_config" and not place):
                continue
            # So many layers as a class has by default are too many for a quick comparison.
            values = [ABSENT] if key in part and key != "num_hidden_layers" else []
            values += [*variants(key, whole[key], whole)] if key in whole else []
            for value in [*values, *_FURTHER.get(key, [])]:
                changed = copy.deepcopy(dict(part))
                changed.pop(key, None)
                if value is not ABSENT:
                    changed[key] = value
                yield (
                    f"{place}.{key}".lstrip("."),
                    value,
                    {**raw, place: changed} if place else changed,
                )
