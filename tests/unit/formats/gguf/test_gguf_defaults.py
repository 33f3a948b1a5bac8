"""Missing config.json keys: a GGUF file gets the defaults of transformers."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from quantforge.errors import InputError, RefusedError
from quantforge.formats.gguf.container import u32_value
from quantforge.formats.gguf.parameters import translate_parameters
from tests import gguf_models
from tests.conftest import Tiny

KEYS = ("rope_theta", "rope_parameters", "rms_norm_eps", "num_experts_per_tok")
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "smollm3", "gemma4")


def read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    if config["model_type"] == "smollm3":  # llama.cpp knows one interval
        config |= {"no_rope_layer_interval": 4, "no_rope_layers": [1] * config["num_hidden_layers"]}
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_config_keys_take_transformers_defaults(tiny: Tiny, family: str) -> None:
    config = read_config(tiny(family))
    bare = {key: value for key, value in config.items() if key not in KEYS}
    full_config: dict[str, Any] = AutoConfig.for_model(**bare).to_dict()
    completed = bare | {key: full_config[key] for key in KEYS if full_config.get(key) is not None}
    assert completed.keys() > bare.keys()
    expected = translate_parameters(completed)
    for config in (bare, bare | {"rope_parameters": None}):
        got = translate_parameters(config)
        assert (got.keys, got.computed) == (expected.keys, expected.computed)


def test_a_missing_rope_type_is_default(tiny: Tiny) -> None:
    """Like in transformers, if ``rope_theta`` is given."""
    bases = {word: {"rope_theta": 1e4} for word in ("sliding_attention", "full_attention")}
    plain = {word: base | {"rope_type": "default"} for word, base in bases.items()}
    translated = [
        translate_parameters(
            read_config(tiny("gemma4")) | {"model_type": "gemma4_text", "rope_parameters": rope}
        )
        for rope in (bases, plain)
    ]
    assert translated[0] == translated[1]


def test_missing_norm_topk_prob_is_refused(tiny: Tiny) -> None:
    config = read_config(tiny("qwen3-moe")) | {"mlp_only_layers": [], "decoder_sparse_step": 1}
    config.pop("norm_topk_prob", None)
    with pytest.raises(RefusedError, match="norm_topk_prob"):
        translate_parameters(config)


def complete_config(model_type: str) -> dict[str, Any]:
    """Return a tiny configuration as transformers completes it."""
    model_type, values = {**gguf_models.FAMILIES, **gguf_models.WRITTEN}[model_type]
    config: dict[str, Any] = AutoConfig.for_model(model_type, **values).to_dict()
    return config


TABLED = {"arcee", "exaone4", "granite", "granitemoe", "llama", "llama4", "mistral", "mixtral"}
PARTIAL = {
    "glm",
    "glm4",
    "glm4_moe",
    "minimax_m2",
    "nemotron",
    "phi",
    "phi3",
    "qwen3_next",
    "stablelm",
}
LATENT = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}
NAMES = {key for key in {**gguf_models.FAMILIES, **gguf_models.WRITTEN} if "-" not in key} - {
    "gpt2"
}
SCALED = NAMES - LATENT - {"gemma4", "ministral3", "phi3"}


@pytest.mark.parametrize(("rope", "carried"), [
    ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}, TABLED),
    ({"rope_type": "linear", "factor": 4.0}, SCALED),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, SCALED),
    ({"rope_type": "dynamic", "factor": 4.0}, set()),
    ({"rope_type": "default", "partial_rotary_factor": 0.75}, PARTIAL | LATENT),
], ids=lambda value: value.get("rope_type") if isinstance(value, dict) else "")  # fmt: skip
def test_only_rope_scaling_supported_by_the_graph_is_written(
    rope: dict[str, Any], carried: set[str]
) -> None:
    written = set()
    for name in NAMES:
        config = complete_config(name)
        config.pop("rope_scaling", None)
        config["rope_parameters"] = {"rope_theta": 1e4, **rope}
        with suppress(RefusedError, InputError):
            translate_parameters(config)
            written.add(name)
    assert written == carried


def test_contradicting_rotary_dimensions_are_refused() -> None:
    config = complete_config("minimax_m2") | {"rotary_dim": 16}
    assert translate_parameters(config).keys["minimax-m2.rope.dimension_count"] == u32_value(16)
    config["rope_parameters"] = {"rope_theta": 1e4, "partial_rotary_factor": 0.25}
    with pytest.raises(InputError, match="rotary_dim = 16, partial_rotary_factor"):
        translate_parameters(config)


@pytest.mark.parametrize("sliding", [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
])  # fmt: skip
def test_scaled_rope_in_sliding_layers_is_refused(sliding: dict[str, Any]) -> None:
    config = complete_config("gemma3")
    config["rope_parameters"] = {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                                 "sliding_attention": sliding}  # fmt: skip
    with pytest.raises(RefusedError, match="layers that slide"):
        translate_parameters(config)
