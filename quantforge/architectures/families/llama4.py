"""Llama 4: a llama with stacked experts in some or all layers, and a vision tower.

Most layers use interleaved rotary embeddings followed by norms of queries and keys without weights, and attend within
chunks of tokens. The others attend to all tokens, without rotary embeddings, and scale queries by the logarithm of
their position. The router weights are multiplied into the input of the experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.declare import (
    NESTED_DECODER_PREFIX,
    STANDALONE_DECODER_NAMES,
    attention,
    gated_mlp,
    multimodal_with_decoder_class,
)
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import SCALINGS_WITH_TABLE, GgufFamily, GgufKeys
from quantforge.architectures.mixtures import (
    DENSE,
    SPARSE,
    dense_or_sparse,
    router_parameters,
    shared_experts,
    stacked_experts,
)
from quantforge.architectures.projector import (
    Projector,
    TowerConfig,
    TowerSizes,
    TowerTensor,
    block_tensors,
    module_tensors,
    unsupported_setting_error,
    weight_tensor,
)
from quantforge.errors import InputError

CHUNKED, FULL = "chunked_attention", "full_attention"
FULL_ATTENTION_PERIOD, CHUNK_TOKENS = 4, 8192  # the last layer of each period has full attention
EXPERTS_WITHOUT_HEAD_NORMS = 128  # number of experts of the one released model without head norms
_TOWER_EPSILON = 1e-5  # epsilon of the tower's norms, fixed in transformers' code
_TOWER_ROPE_THETA = 1e4  # fixed in llama.cpp
_TOWER, _ADAPTER = "vision_model", "vision_model.vision_adapter.mlp"
_STACKED_EXPERTS = stacked_experts("ffn", module="feed_forward.experts", transposed=True)
EXPERTS = replace(
    _STACKED_EXPERTS,
    stacks=tuple(
        replace(block_tensors, takes_weighted_tokens=True)
        for block_tensors in _STACKED_EXPERTS.stacks
    ),
)


def layer_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer: with experts or dense.

    Experts are in ``moe_layers``, or in every ``interleave_moe_layer_step``-th layer.

    Raises:
        InputError: ``moe_layers`` is not a list of layers, or ``interleave_moe_layer_step`` is not a positive number.
    """
    sparse, step = config.get("moe_layers"), config["interleave_moe_layer_step"]
    if sparse is None and type(step) is int and step > 0:
        sparse = range(step - 1, config["num_hidden_layers"], step)
    if not isinstance(sparse, list | range) or any(type(layer) is not int for layer in sparse):
        raise InputError(
            f"moe_layers = {str(sparse)[:60]}, interleave_moe_layer_step = {str(step)[:40]}",
            "a list of layers, or a positive number",
            subject="config.json",
        )
    return [SPARSE if layer in sparse else DENSE for layer in range(config["num_hidden_layers"])]


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None; errors as `layer_kind_names`.

    llama.cpp has a fixed rule for which layers use rotary embeddings and which have full attention, requires at least
    one of the latter, and infers from the number of experts whether there are head norms.
    """
    layers = range(config["num_hidden_layers"])
    expected_flags = [int((layer + 1) % FULL_ATTENTION_PERIOD != 0) for layer in layers]
    moe_step = config["interleave_moe_layer_step"]
    if len(layers) < FULL_ATTENTION_PERIOD:
        return f"{len(layers)} layers", f"{FULL_ATTENTION_PERIOD} or more"
    if layer_kind_names(config) != layer_kind_names({**config, "moe_layers": None}):
        return f"moe_layers = {str(config['moe_layers'])[:40]}", f"every {moe_step}. layer"
    rotary_flags, interval = (
        config.get("no_rope_layers"),
        config.get("no_rope_layer_interval", FULL_ATTENTION_PERIOD),
    )
    if rotary_flags and (
        not isinstance(rotary_flags, list) or rotary_flags[: len(layers)] != expected_flags
    ):
        return (
            f"no_rope_layers = {str(rotary_flags)[:40]}",
            f"0 for every {FULL_ATTENTION_PERIOD}. layer",
        )
    if not rotary_flags and interval != FULL_ATTENTION_PERIOD:
        return f"no_rope_layer_interval = {str(interval)[:40]}", str(FULL_ATTENTION_PERIOD)
    layer_types = config.get("layer_types")
    if layer_types is not None and layer_types != [
        (FULL, CHUNKED)[flag] for flag in expected_flags
    ]:
        return (
            f"layer_types = {str(layer_types)[:40]}",
            f"{FULL} for every {FULL_ATTENTION_PERIOD}. layer",
        )
    has_head_norms, experts = config.get("use_qk_norm", True), config["num_local_experts"]
    if bool(has_head_norms) is (experts == EXPERTS_WITHOUT_HEAD_NORMS):
        return (
            f"use_qk_norm = {has_head_norms} with {experts} experts",
            f"false with {EXPERTS_WITHOUT_HEAD_NORMS} alone",
        )
    return None


def read_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe; refuse a file without attention chunks."""
    sizes = keys.common_config()
    if keys.get_int("attention.sliding_window", CHUNK_TOKENS) == 0:
        raise keys.not_read_error(
            "attention.sliding_window = 0", f"chunks of {CHUNK_TOKENS} tokens"
        )
    heads, experts = sizes["num_attention_heads"], keys.get_int("expert_count")
    return {
        **sizes,
        "num_key_value_heads": keys.get_int("attention.head_count_kv", heads),
        "intermediate_size_mlp": keys.get_int("feed_forward_length"),
        "intermediate_size": keys.get_int("expert_feed_forward_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.get_int("expert_used_count"),
        "interleave_moe_layer_step": keys.get_int("interleave_moe_layer_step"),
        "use_qk_norm": experts != EXPERTS_WITHOUT_HEAD_NORMS,
        "hidden_act": "silu",
        **keys.rope_config(keys.get_int("attention.key_length")),
    }


def llama4_projector(config: Mapping[str, Any]) -> Projector:
    """Return the vision tower and its projector for a whole configuration; errors as `TowerConfig`."""
    vision = TowerConfig(config["vision_config"])
    vision.require("hidden_act", "gelu")
    vision.require("num_channels", 3)
    vision.require_rope_theta(_TOWER_ROPE_THETA)
    sizes = vision.sizes(TowerSizes(768, 5632, 34, 16, 14))
    width, patch = sizes.width, sizes.patch
    image = vision.size("image_size", 448)
    patches_per_side, merge_size = image // patch, _merged_patches(vision)
    if image % patch or patches_per_side % merge_size:
        raise unsupported_setting_error(
            f"image_size = {image} of patches of {patch}, {merge_size} x {merge_size} of which are joined",
            "whole ones",
        )
    projector_width = vision.size("projector_input_dim", 4096)
    vision.require("projector_output_dim", projector_width, default=4096)
    vision.require("vision_output_dim", projector_width, default=7680)
    vision.require("intermediate_size", width * merge_size**2, default=5632)
    decoder_width = TowerConfig(text_config(config), "text_config").size("hidden_size", 5120)
    block = {
        "input_layernorm": "ln1", "post_attention_layernorm": "ln2", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_out",
        "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    }  # fmt: skip
    return Projector(
        "llama4",
        {
            "use_gelu": True,
            **sizes.keys(image, _TOWER_EPSILON, decoder_width),
            "vision.projector.scale_factor": merge_size,
        },
        (
            weight_tensor(
                f"{_TOWER}.patch_embedding.linear",
                "v.patch_embd",
                (width, 3 * patch**2),
                float32=True,
            ),
            TowerTensor(f"{_TOWER}.class_embedding", ("v.class_embd",), (width,)),
            TowerTensor(
                f"{_TOWER}.positional_embedding_vlm",
                ("v.position_embd.weight",),
                (patches_per_side**2 + 1, width),
                float32=True,
            ),
            *module_tensors(f"{_TOWER}.layernorm_pre", "v.pre_ln", (width,)),
            *module_tensors(f"{_TOWER}.layernorm_post", "v.post_ln", (width,)),
            *block_tensors(f"{_TOWER}.model.layers", sizes, block),
            weight_tensor(
                f"{_ADAPTER}.fc1", "mm.model.mlp.1", (projector_width, width * merge_size**2)
            ),
            weight_tensor(f"{_ADAPTER}.fc2", "mm.model.mlp.2", (projector_width, projector_width)),
            weight_tensor(
                "multi_modal_projector.linear_1", "mm.model.fc", (decoder_width, projector_width)
            ),
        ),
        known_difference="llama.cpp hands on what it makes of a tile of a picture column by column,"
        " the model row by row",
    )


def _merged_patches(vision: TowerConfig) -> int:
    """Return how many neighboring patches per row are merged: the inverse of ``pixel_shuffle_ratio``."""
    ratio = vision.fraction("pixel_shuffle_ratio", 0.5)
    merge_size = round(1 / ratio) if ratio else 0
    if not merge_size or 1 / merge_size != ratio:
        raise unsupported_setting_error(
            f"pixel_shuffle_ratio = {ratio}", "one part of a whole number"
        )
    return merge_size


TEXT_ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="llama4_text",
    graph=None,
    kinds=dense_or_sparse(
        llama.NORMS,
        attention("attention_bias"),
        dense=gated_mlp(module="feed_forward", width="dense"),
        sparse=(
            router_parameters("feed_forward.router"),
            EXPERTS,
            *shared_experts("ffn", module="feed_forward.shared_expert"),
        ),
    ),
    gguf=GgufFamily(
        "llama4",
        transformers_class="Llama4ForCausalLM",
        rope_scalings=SCALINGS_WITH_TABLE,
        has_experts=True,
        size_keys={"feed_forward_length": "dense", "expert_feed_forward_length": "ffn"},
        integer_keys={"interleave_moe_layer_step": "interleave_moe_layer_step"},
        required_values={
            "attention_chunk_size": CHUNK_TOKENS,
            "attn_temperature_tuning": True,
            "floor_scale": CHUNK_TOKENS,
            "attn_scale": 0.1,
        },
        unsupported=unsupported_by_llama_cpp,
        read_config=read_config,
    ),
    layer_kind_names=layer_kind_names,
    extra_layer_types=(CHUNKED,),
    sizes={
        "experts": ("num_local_experts", "num_experts"),
        "dense": ("intermediate_size_mlp",),
    },
    defaults={
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "vocab_size": 202048,
        "max_position_embeddings": 131072,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
    },
    windows=WindowRule(
        width=8192,
        width_key="attention_chunk_size",
        layer_type=CHUNKED,
        period=4,
        period_key="no_rope_layer_interval",
        flags_key="no_rope_layers",
    ),
)
ARCHITECTURE = replace(
    multimodal_with_decoder_class(
        TEXT_ARCHITECTURE,
        "llama4",
        (r"(model\.)?(vision_model|multi_modal_projector)\..*",),
        (("language_model.", ""), ("model.language_model.", "model.")),
    ),
    unmapped_prefixes={
        "llama4": rf"{STANDALONE_DECODER_NAMES}|{NESTED_DECODER_PREFIX}\.",
        "llama4_text": rf"{NESTED_DECODER_PREFIX}\.",
    },
    projector={"llama4": llama4_projector},
)
FAMILIES = {"llama4": ARCHITECTURE, "llama4_text": ARCHITECTURE}
