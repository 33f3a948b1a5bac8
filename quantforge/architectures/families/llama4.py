"""Llama 4: a llama with experts, stored stacked, in some layers or in all, beside a vision tower.

Most layers rotate neighbours, norm queries and keys after that without weights, and look at their chunk of the tokens
alone; the others see everything, do not rotate, and let queries grow with the logarithm of their position. Experts read
what the weights of the router have been multiplied into.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.declare import ALONE, WITHIN, attention, beside_towers, gated_mlp
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import WITH_TABLE, GgufFamily, Keys
from quantforge.architectures.mixtures import (
    DENSE,
    SPARSE,
    dense_or_sparse,
    experts_in_one,
    router,
    shared_experts,
)
from quantforge.architectures.projector import (
    Projector,
    TowerConfig,
    TowerSizes,
    TowerTensor,
    module,
    not_carried,
    stack,
    weight,
)
from quantforge.errors import InputError

CHUNKED, FULL = "chunked_attention", "full_attention"
PERIOD, CHUNK = 4, 8192  # of layers, the last of which sees everything; of tokens
NO_HEAD_NORMS = 128  # experts of the one release without norms over heads
_EPS = 1e-5  # of the tower's norms, in transformers' code, whatever a configuration says
_THETA = 1e4  # llama.cpp has it built in
_TOWER, _ADAPTER = "vision_model", "vision_model.vision_adapter.mlp"
_STACKED = experts_in_one("ffn", module="feed_forward.experts", transposed=True)
EXPERTS = replace(_STACKED, stacks=tuple(replace(stack, spread=True) for stack in _STACKED.stacks))


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer: experts in those of ``moe_layers``, or in each ``interleave_moe_layer_step``-th.

    Raises:
        InputError: ``moe_layers`` is no list of layers, or ``interleave_moe_layer_step`` no positive number.
    """
    sparse, step = config.get("moe_layers"), config["interleave_moe_layer_step"]
    if sparse is None and type(step) is int and step > 0:
        sparse = range(step - 1, config["num_hidden_layers"], step)
    if not isinstance(sparse, list | range) or any(type(layer) is not int for layer in sparse):
        raise InputError(
            f"config.json: moe_layers = {str(sparse)[:60]}, interleave_moe_layer_step = {str(step)[:40]}",
            "a list of layers, or a positive number",
        )
    return [SPARSE if layer in sparse else DENSE for layer in range(config["num_hidden_layers"])]


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None; errors as `kinds`.

    It knows by heart which layers rotate and which see everything, of which it wants one, and by the number of experts
    whether there are norms over heads.
    """
    layers = range(config["num_hidden_layers"])
    regular = [int((layer + 1) % PERIOD != 0) for layer in layers]
    step = config["interleave_moe_layer_step"]
    if len(layers) < PERIOD:
        return f"{len(layers)} layers", f"{PERIOD} or more"
    if kinds(config) != kinds({**config, "moe_layers": None}):
        return f"moe_layers = {str(config['moe_layers'])[:40]}", f"every {step}. layer"
    stated, interval = config.get("no_rope_layers"), config.get("no_rope_layer_interval", PERIOD)
    if stated and (not isinstance(stated, list) or stated[: len(layers)] != regular):
        return f"no_rope_layers = {str(stated)[:40]}", f"0 for every {PERIOD}. layer"
    if not stated and interval != PERIOD:
        return f"no_rope_layer_interval = {str(interval)[:40]}", str(PERIOD)
    words = config.get("layer_types")
    if words is not None and words != [(FULL, CHUNKED)[flag] for flag in regular]:
        return f"layer_types = {str(words)[:40]}", f"{FULL} for every {PERIOD}. layer"
    normed, experts = config.get("use_qk_norm", True), config["num_local_experts"]
    if bool(normed) is (experts == NO_HEAD_NORMS):
        return f"use_qk_norm = {normed} with {experts} experts", f"false with {NO_HEAD_NORMS} alone"
    return None


def read_config(keys: Keys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe; a file without chunks is not read."""
    sizes = keys.sizes()
    if keys.integer("attention.sliding_window", CHUNK) == 0:
        raise keys.not_read("attention.sliding_window = 0", f"chunks of {CHUNK} tokens")
    heads, experts = sizes["num_attention_heads"], keys.integer("expert_count")
    return {
        **sizes,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "intermediate_size_mlp": keys.integer("feed_forward_length"),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step"),
        "use_qk_norm": experts != NO_HEAD_NORMS,
        "hidden_act": "silu",
        **keys.rope(keys.integer("attention.key_length")),
    }


def projector(config: Mapping[str, Any]) -> Projector:
    """Return the vision tower with its projector, for a whole configuration; errors as `TowerConfig`."""
    vision = TowerConfig(config["vision_config"])
    vision.require("hidden_act", "gelu")
    vision.require("num_channels", 3)
    vision.require_theta(_THETA)
    sizes = vision.sizes(TowerSizes(768, 5632, 34, 16, 14))
    width, patch = sizes.width, sizes.patch
    image = vision.size("image_size", 448)
    side, merged = image // patch, _merged(vision)
    if image % patch or side % merged:
        raise not_carried(
            f"image_size = {image} of patches of {patch}, {merged} x {merged} of which are joined",
            "whole ones",
        )
    joined = vision.size("projector_input_dim", 4096)
    vision.require("projector_output_dim", joined, otherwise=4096)
    vision.require("vision_output_dim", joined, otherwise=7680)
    vision.require("intermediate_size", width * merged**2, otherwise=5632)
    out = TowerConfig(text_config(config), "text_config").size("hidden_size", 5120)
    block = {
        "input_layernorm": "ln1", "post_attention_layernorm": "ln2", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_out",
        "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    }  # fmt: skip
    return Projector(
        "llama4",
        {"use_gelu": True, **sizes.keys(image, _EPS, out), "vision.projector.scale_factor": merged},
        (
            weight(
                f"{_TOWER}.patch_embedding.linear", "v.patch_embd", (width, 3 * patch**2), wide=True
            ),
            TowerTensor(f"{_TOWER}.class_embedding", ("v.class_embd",), (width,)),
            TowerTensor(
                f"{_TOWER}.positional_embedding_vlm",
                ("v.position_embd.weight",),
                (side**2 + 1, width),
                wide=True,
            ),
            *module(f"{_TOWER}.layernorm_pre", "v.pre_ln", (width,)),
            *module(f"{_TOWER}.layernorm_post", "v.post_ln", (width,)),
            *stack(f"{_TOWER}.model.layers", sizes, block),
            weight(f"{_ADAPTER}.fc1", "mm.model.mlp.1", (joined, width * merged**2)),
            weight(f"{_ADAPTER}.fc2", "mm.model.mlp.2", (joined, joined)),
            weight("multi_modal_projector.linear_1", "mm.model.fc", (out, joined)),
        ),
        differs="llama.cpp hands on what it makes of a tile of a picture column by column, the model row by row",
    )


def _merged(vision: TowerConfig) -> int:
    """Return how many neighbours in a row are joined: what ``pixel_shuffle_ratio`` is one part of."""
    ratio = vision.real("pixel_shuffle_ratio", 0.5)
    merged = round(1 / ratio) if ratio else 0
    if not merged or 1 / merged != ratio:
        raise not_carried(f"pixel_shuffle_ratio = {ratio}", "one part of a whole number")
    return merged


TEXT = replace(
    llama.ARCHITECTURE,
    model_type="llama4_text",
    graph=None,
    kinds=dense_or_sparse(
        llama.NORMS,
        attention("attention_bias"),
        dense=gated_mlp(module="feed_forward", width="dense"),
        sparse=(
            router("feed_forward.router"),
            EXPERTS,
            *shared_experts("ffn", module="feed_forward.shared_expert"),
        ),
    ),
    gguf=GgufFamily(
        "llama4",
        class_name="Llama4ForCausalLM",
        scalings=WITH_TABLE,
        experts=True,
        sizes={"feed_forward_length": "dense", "expert_feed_forward_length": "ffn"},
        numbers={"interleave_moe_layer_step": "interleave_moe_layer_step"},
        graph={
            "attention_chunk_size": CHUNK,
            "attn_temperature_tuning": True,
            "floor_scale": CHUNK,
            "attn_scale": 0.1,
        },
        unsupported=unsupported_by_llama_cpp,
        read_config=read_config,
    ),
    kind_of=kinds,
    other_words=(CHUNKED,),
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
        word=CHUNKED,
        period=4,
        period_key="no_rope_layer_interval",
        flags_key="no_rope_layers",
    ),
)
ARCHITECTURE = replace(
    beside_towers(
        TEXT,
        "llama4",
        (r"(model\.)?(vision_model|multi_modal_projector)\..*",),
        (("language_model.", ""), ("model.language_model.", "model.")),
    ),
    unmapped={
        "llama4": rf"{ALONE}|{WITHIN}\.",
        "llama4_text": rf"{WITHIN}\.",
    },
    projector={"llama4": projector},
)
FAMILIES = {"llama4": ARCHITECTURE, "llama4_text": ARCHITECTURE}
