"""Keys that config.json leaves out: a GGUF file gets what transformers computes with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from quantforge.errors import RefusedError
from quantforge.formats.gguf.families import family_of
from quantforge.formats.gguf.parameters import parameters
from tests.conftest import Tiny

KEYS = ("rope_theta", "rope_parameters", "rms_norm_eps", "num_experts_per_tok")
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "smollm3")


def config_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    if found["model_type"] == "smollm3":  # llama.cpp knows one interval
        found |= {"no_rope_layer_interval": 4, "no_rope_layers": [1] * found["num_hidden_layers"]}
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_are_those_of_transformers(tiny: Tiny, family: str) -> None:
    config = config_of(tiny(family))
    bare = {key: value for key, value in config.items() if key not in KEYS}
    whole: dict[str, Any] = AutoConfig.for_model(**bare).to_dict()
    stated = bare | {key: whole[key] for key in KEYS if whole.get(key) is not None}
    assert stated.keys() > bare.keys()
    found = family_of(config)
    assert parameters(bare, found).keys == parameters(stated, found).keys


def test_experts_that_are_not_normalised_are_refused_where_nothing_is_said(tiny: Tiny) -> None:
    config = config_of(tiny("qwen3-moe")) | {"mlp_only_layers": [], "decoder_sparse_step": 1}
    config.pop("norm_topk_prob", None)
    with pytest.raises(RefusedError, match="norm_topk_prob"):
        parameters(config, family_of(config))


def test_rounded_frequencies_do_not_hide_the_window_that_is_left_out(tiny: Tiny) -> None:
    config = config_of(tiny("qwen2"))
    layers = config["num_hidden_layers"]
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "truncate": False,
            "original_max_position_embeddings": 32}  # fmt: skip
    config |= {"rope_parameters": rope, "use_sliding_window": True, "sliding_window": 16,
               "layer_types": ["sliding_attention"] * layers}  # fmt: skip
    found = parameters(config, family_of(config)).events
    assert [event.kind for event in found] == ["rope-rounded", "window-left-out"]
