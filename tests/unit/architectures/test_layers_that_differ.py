"""Gemma 4 and related families: layers with different heads, shared keys and values, and omitted parts."""

from __future__ import annotations

from typing import Any

import pytest

from quantforge.architectures.match import ModelLayout, match_tensors
from quantforge.errors import InputError
from quantforge.files.reader import open_checkpoint
from quantforge.formats.gguf.parameters import translate_parameters
from quantforge.model.skeleton import build_skeleton
from quantforge.plans import StoredTensor
from tests.conftest import MIXTURES, SIZES, Tiny

KEY = "per_layer_config"
S, F = "sliding_attention", "full_attention"
PUBLISHED = {"global_head_dim": 32, "num_global_key_value_heads": 1}


@pytest.fixture
def read_config_and_headers(tiny: Tiny) -> Any:
    def read(family: str) -> tuple[dict[str, Any], list[StoredTensor]]:
        checkpoint = open_checkpoint(tiny(family))
        return dict(checkpoint.config), [
            item.to_stored_tensor() for item in checkpoint.entries.values()
        ]

    return read


def shared_linears(model_layout: ModelLayout, block: int) -> list[tuple[str, ...]]:
    return [shared.linears for shared in model_layout.layers[block].inputs]


@pytest.mark.parametrize("family", ["gemma4-equal", "gemma4-moe"])
def test_published_gemma4_keys_equal_the_per_layer_config(
    read_config_and_headers: Any, family: str
) -> None:
    config, stored = read_config_and_headers(family)
    written = match_tensors(config, stored)
    del config[KEY]
    published = match_tensors({**config, **PUBLISHED}, stored)
    assert published.layers == written.layers
    assert published.dimensions == written.dimensions
    with pytest.raises(InputError, match="shape"):
        match_tensors({**config, **PUBLISHED, "global_head_dim": 16}, stored)


def test_omitted_linears_have_no_shared_input(read_config_and_headers: Any) -> None:
    model_layout = match_tensors(*read_config_and_headers("gemma4-equal"))
    q, k, v = (f"self_attn.{name}_proj" for name in "qkv")
    assert shared_linears(model_layout, 0)[0] == (q, k, v)
    assert shared_linears(model_layout, 1)[0] == (q, k)
    assert not any(kind.stacks for kind in model_layout.layers)
    assert model_layout.architecture is not None
    assert not model_layout.architecture.publishes_stacked_experts
    assert model_layout.architecture.needs_model_replay is False
    assert all(kind.stacks for kind in match_tensors(*read_config_and_headers("gemma4-moe")).layers)


def test_kv_sharing_layers_have_wider_mlps_and_drop_stored_keys(
    read_config_and_headers: Any,
) -> None:
    config, stored = read_config_and_headers("gemma4")
    model_layout = match_tensors(config, stored)
    assert shared_linears(model_layout, 2)[0] == ("self_attn.q_proj",)
    assert [kind.states == () for kind in model_layout.layers] == [False, False, True, True]
    shapes = {tensor.name: tensor.header.shape for tensor in model_layout.tensors}
    up = [shapes[f"model.layers.{block}.mlp.up_proj.weight"][0] for block in range(4)]
    assert up == [128, 128, 256, 256]
    assert model_layout.architecture is not None
    assert model_layout.architecture.needs_model_replay is True
    name = "model.layers.{}.self_attn.k_proj.weight"
    more = StoredTensor(name.format(3), "BF16", (64, 64))
    assert [tensor.name for tensor, _ in match_tensors(config, [*stored, more]).dropped] == [
        more.name
    ]
    fewer = [tensor for tensor in stored if tensor.name != name.format(1)]
    with pytest.raises(InputError, match=r"layers\.1\.self_attn\.k_proj\.weight: missing"):
        match_tensors(config, [*fewer, more])


@pytest.mark.parametrize(
    "changes",
    [
        {KEY: [1]},
        {KEY: {"0": {"head_dim": 64}}},
        {KEY: {"1": {"head_dim": 32}, "3": {"head_dim": 64}}},
        {KEY: {"1": {"intermediate_size": 64}, "3": {"intermediate_size": 64}}},
        {"use_bidirectional_attention": "all"},
    ],
    ids=str,
)
def test_undeclared_gemma4_settings_fall_back_to_name_matching(
    read_config_and_headers: Any, changes: dict[str, Any]
) -> None:
    config, stored = read_config_and_headers("gemma4-equal")
    model_layout = match_tensors({**config, **changes}, stored)
    assert model_layout.architecture is None
    assert next(iter(changes)) in model_layout.linear_rule


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma4", {"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ("gemma4", {"num_kv_shared_layers": 3}, "no earlier layer makes keys"),
        ("gemma4", {"num_kv_shared_layers": "2"}, "num_kv_shared_layers"),
        (
            "gemma4-moe",
            {"num_kv_shared_layers": 1},
            "num_kv_shared_layers = 1 with hidden_size_per",
        ),
        ("gemma4", {"rope_parameters": {}}, "rope_parameters of sliding_attention = None"),
        (
            "gemma4",
            {"rope_parameters": {S: {"rope_theta": 1e4}, F: {}}},
            "rope_parameters of full_at",
        ),
        ("gemma4", {"rope_parameters": "x"}, "rope_parameters = 'x'"),
        ("gemma4", {"sliding_window": None}, "sliding_window = null"),
        ("gemma4", {"final_logit_softcapping": 0.0}, "final_logit_softcapping = '0.0'"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping = '0'"),
        ("gemma2", {"final_logit_softcapping": -3.0}, "final_logit_softcapping"),
        ("gemma2", {"final_logit_softcapping": True}, "final_logit_softcapping"),
        ("gemma2", {"sliding_window": None, "layer_types": None}, "sliding_window = null"),
        ("qwen2", {"sliding_window": None}, "sliding_window = null"),
        ("mistral", {"sliding_window": None, "layer_types": [S, F, F]}, "sliding_window = null"),
        ("exaone4", {"sliding_window": None, "layer_types": None}, "sliding_window = null"),
        ("llama4", {"attention_chunk_size": None}, "attention_chunk_size = null"),
        (
            "llama4",
            {"attention_chunk_size": None, "layer_types": [F] * 4},
            "attention_chunk_size = null",
        ),
        ("llama4", {"no_rope_layers": [1, 1, 1, 0, 1], "layer_types": None}, "no_rope_layers"),
        ("llama4", {"no_rope_layers": [1, 1, 1], "layer_types": None}, "no_rope_layers"),
        ("gemma4", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input"),
        ("gemma4-equal", {KEY: {"1": {"head_dim": "x"}, "3": {"head_dim": "x"}}}, "head_dim"),
        ("gemma4-equal", {KEY: None, "num_attention_heads": "4"}, "num_attention_heads"),
        ("gemma4-moe", {"num_experts": None}, "num_experts"),
        ("gemma4-moe", {"top_k_experts": 5}, "top_k_experts = 5 of 4 experts"),
    ],
    ids=str,
)
def test_impossible_configuration_values_are_refused(
    read_config_and_headers: Any, family: str, changes: dict[str, Any], message: str
) -> None:
    config, stored = read_config_and_headers(family)
    with pytest.raises(InputError, match=message):
        match_tensors({**config, **changes}, stored)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("exaone4", {"sliding_window": None, "layer_types": [F] * 3}),
        ("qwen2", {"sliding_window": None, "layer_types": None}),
        ("mistral", {"sliding_window": None}),
        ("phi3", {"sliding_window": None}),
        ("llama4", {"no_rope_layers": [1, 1, 1, 0, 1]}),  # beside layer_types, which say all
        ("llama4", {"no_rope_layers": [], "layer_types": None}),
        ("gemma2", {"final_logit_softcapping": None}),
    ],
    ids=str,
)
def test_configurations_that_transformers_runs_are_accepted(
    read_config_and_headers: Any, family: str, changes: dict[str, Any]
) -> None:
    config, stored = read_config_and_headers(family)
    assert match_tensors({**config, **changes}, stored).architecture is not None


def test_the_last_gemma4_layer_always_has_full_attention(read_config_and_headers: Any) -> None:
    config, stored = read_config_and_headers("gemma4-moe")
    assert MIXTURES["gemma4-moe"][1]["layer_types"][-1] == "full_attention"
    config["layer_types"] = [*config["layer_types"][:-1], "sliding_attention"]
    model_layout = match_tensors(config, stored)
    assert model_layout.layers[-1].name == "full_attention"
    assert model_layout.architecture is not None
    assert model_layout.architecture.windows.of_layers(config, 3) == (16, 0, 0)


FULL_SIZE_CONFIGS = {
    "shared": {
        "hidden_size": 1536, "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1,
        "intermediate_size": 6144, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "layer_types": [S, S, S, S, F] * 7,
    },
    "mixture": {
        "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "intermediate_size": 2112, "num_experts": 128,
        "enable_moe_block": True, "top_k_experts": 8, "moe_intermediate_size": 704, "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision", "layer_types": [S, S, S, S, S, F] * 5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FULL_SIZE_CONFIGS)
def test_full_size_gemma4_models_are_matched_and_translated_to_gguf(name: str) -> None:
    """Models without weights; missing keys take the defaults of the family."""
    text = {"model_type": "gemma4_text", "head_dim": 256, **FULL_SIZE_CONFIGS[name]}
    config = {"model_type": "gemma4", "text_config": text, "tie_word_embeddings": True}
    state_dict = build_skeleton(config).state_dict()
    stored = [
        StoredTensor(key.replace("model.", "model.language_model.", 1), "BF16", tuple(value.shape))
        for key, value in state_dict.items()
        if key != "lm_head.weight"
    ]
    model_layout = match_tensors(config, stored)
    assert {tensor.name for tensor in model_layout.tensors} == state_dict.keys() - {
        "lm_head.weight"
    }
    keys = translate_parameters(text).keys
    full = [index for index, word in enumerate(FULL_SIZE_CONFIGS[name]["layer_types"]) if word == F]
    heads = keys["gemma4.attention.head_count_kv"].value
    assert {heads[index] for index in full} == {2 if name == "mixture" else 1}
    widths = keys["gemma4.feed_forward_length"].value
    assert widths[-1] == (2112 if name == "mixture" else 2 * 6144)
    assert widths[0] == FULL_SIZE_CONFIGS[name]["intermediate_size"]


@pytest.mark.parametrize(
    ("text", "head", "windows"),
    [
        ({"model_type": "mistral"}, 16, (4096,) * 3),
        ({}, 16, (4096,) * 3),  # transformers takes mistral
        ({"model_type": "ministral3"}, 128, (0,) * 3),
    ],
    ids=str,
)
def test_multimodal_text_defaults_come_from_the_text_model_type(
    text: dict[str, Any], head: int, windows: tuple[int, ...]
) -> None:
    config = {
        "model_type": "mistral3",
        "text_config": {**SIZES, **text},
        "tie_word_embeddings": False,
    }
    declared = {"model_type": "mistral", **config["text_config"]}
    state_dict = build_skeleton({**config, "text_config": declared}).state_dict()
    assert state_dict["model.layers.0.self_attn.q_proj.weight"].shape[0] == 4 * head
    model_layout = match_tensors(
        config, [StoredTensor(key, "BF16", tuple(value.shape)) for key, value in state_dict.items()]
    )
    assert model_layout.dimensions is not None
    assert model_layout.dimensions.head == head
    assert model_layout.architecture is not None
    assert model_layout.architecture.windows.of_layers(model_layout.config, 3) == windows
