"""Keys of a configuration that transformers obeys: each is written into a GGUF file, or refused by its name.

`scripts/gguf_keys.py` holds the same against llama.cpp itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import AutoConfig

from quantforge.architectures import architecture_of
from quantforge.architectures.families import declared_families
from quantforge.errors import QuantForgeError, RefusedError
from quantforge.formats.gguf.parameters import translate_parameters
from scripts.gguf_key_changes import SKIPPED, variants
from tests import gguf_models

MODELS = {**gguf_models.FAMILIES, **gguf_models.WRITTEN}
ABSENT = "(absent)"
# Keys that change nothing of what a model computes, and those whose value others state: of which layers have windows,
# positions or experts, and how wide heads are. A tied head is told by the tensors.
INERT = {
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "embedding_dropout", "hidden_dropout", "resid_pdrop"),
    *("residual_dropout", "router_aux_loss_coef", "router_jitter_noise", "initializer_range", "pretraining_tp"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "num_nextn_predict_layers", "reorder_and_upcast_attn"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    *("tie_word_embeddings", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "full_attn_idxs"),
    *("no_rope_layer_interval", "qk_head_dim"),
}  # fmt: skip
# Keys that others switch on, which these models do not.
IDLE = {
    "gemma4": {"num_experts", "top_k_experts"},
    "gemma4-equal": {"num_experts", "top_k_experts", "use_double_wide_mlp"},
    "gemma4-other": {"num_experts", "top_k_experts", "use_double_wide_mlp"},
    "gemma4-moe": {"use_double_wide_mlp"},
}


def complete_config(name: str, **changes: object) -> dict[str, Any]:
    """Return the configuration of a tiny model, with all keys of transformers' class."""
    model_type, values = MODELS[name]
    config: dict[str, Any] = {**AutoConfig.for_model(model_type, **values).to_dict(), **changes}
    return {key: value for key, value in config.items() if value != ABSENT}


def test_derived_families_do_not_share_a_gguf_declaration() -> None:
    """Families derived with `replace` would inherit it; only multimodal wrappers may share it."""
    homes: dict[int, list[str]] = {}
    for name in declared_families():
        declared = architecture_of({"model_type": name})
        if declared is not None and declared.gguf is not None:
            homes.setdefault(id(declared.gguf), []).append(name)
    shared = {
        tuple(n) for n in homes.values() if len({id(declared_families()[name]) for name in n}) > 1
    }
    assert shared == {
        ("deepseek_v3", "kimi_k2", "kimi_k25"),
        ("ministral3", "mistral3"),
    }


def translation_or_error(config: Mapping[str, Any]) -> object:
    """Return the GGUF translation of a configuration, or the error message."""
    try:
        parameters, declared = translate_parameters(config), architecture_of(config)
        assert declared is not None
        layers = declared.layer_kinds(config, parameters.dimensions)
    except (QuantForgeError, TypeError, ValueError, KeyError, AttributeError) as error:
        return str(error)
    return (
        parameters.keys,
        parameters.computed,
        parameters.events,
        declared.for_config(config).outer_parameters,
        layers,
    )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_config_key_of_transformers_is_read_or_listed(name: str) -> None:
    """Each key either changes the translation or is listed as without effect."""
    config = complete_config(name)
    plain = translation_or_error(config)
    assert not isinstance(plain, str), plain
    overlooked = {
        key
        for key, value in config.items()
        if not SKIPPED.fullmatch(key)
        if all(
            translation_or_error({**config, key: other}) == plain
            for other in variants(key, value, config)
        )
    }
    assert overlooked <= INERT | IDLE.get(name, set())


_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "match"), [
    *((name, {"is_causal": False}, "is_causal = False") for name in ("llama", "gpt2", "qwen3_next")),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    *((name, {key: 0.0}, key) for name, key in (
        ("granite", "embedding_multiplier"), ("granite", "residual_multiplier"), ("granitemoe", "residual_multiplier"),
        ("granitemoe", "embedding_multiplier"), ("cohere", "logit_scale"), ("cohere2", "logit_scale"),
        *((name, "routed_scaling_factor") for name in ("glm4_moe", "dots1", "deepseek_v3")),
    )),
    *((name, {"rope_parameters": {**_YARN, "truncate": False}}, "truncate = false")
      for name in ("llama-tied", "qwen3", "gemma")),
    *((name, {"rope_parameters": {**_YARN, "beta_fast": 4.0, "beta_slow": 2.0}}, "beta_fast = 4, beta_slow = 2")
      for name in ("llama-tied", "mistral", "qwen3", "seed_oss", "qwen3_moe")),
    *((name, {"rms_norm_eps": 0.3}, "rms_norm_eps") for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")),
    ("deepseek_v3", {"head_dim": 2}, "head_dim"), ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("gemma", {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}, "activation 'silu'"),
    ("deepseek_v3", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3"),
    ("hunyuan_v1_moe", {"moe_topk": 0}, "moe_topk"),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache"), ("lfm2_moe", {"conv_L_cache": 1}, "conv_L_cache"),
    ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ("qwen3_next", {"layer_types": ["full_attention"] * 4}, "layers that are all full_attention"),
    ("mixtral", {"head_dim": 1}, "head_dim"),
    ("exaone4", {"num_hidden_layers": 64, "layer_types": ["full_attention"] * 64}, "num_hidden_layers = 64"),
    *((name, {"num_hidden_layers": 27}, "q_lora_rank = 32") for name in ("deepseek_v2", "deepseek_v3")),
    *((name, {"head_dim": 32}, "head_dim 32") for name in ("starcoder2", "lfm2", "lfm2_moe")),
], ids=str)  # fmt: skip
def test_config_values_no_graph_supports_are_refused_by_name(
    name: str, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(RefusedError, match=f"{match}.*cannot be carried by a GGUF file"):
        translate_parameters(complete_config(name, **changes))
